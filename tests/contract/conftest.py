"""Where contract tests run. On a GPU, their kernels are built in parallel before the first of them."""

from __future__ import annotations

import sys
import time

import pytest
import torch
from contract_kernels import kernels
from filelock import FileLock

from flash_attention.backends.cuda import device_facts_of
from flash_helpers import build


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors are."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def _built_kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    if not torch.cuda.is_available():
        return
    begin = time.perf_counter()
    facts = device_facts_of()
    needed = kernels(facts)
    # Of several test processes one builds with all cores; the others wait, and find everything built.
    with FileLock(tmp_path_factory.getbasetemp().parent / "kernels.lock"):
        build.build_kernels(needed, [facts.target])
    print(f"\n{len(needed)} kernels ready in {time.perf_counter() - begin:.1f} s", file=sys.stderr)
