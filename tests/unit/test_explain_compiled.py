"""``explain --compile``: the loop that runs, for the kernels that ``attention`` picks."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_helpers.build.sass import find_tool
from flash_helpers.explain.explanation import compile_facts
from flash_helpers.kernel_configs import DType, choose_ampere_kernel, choose_hopper_kernel
from flash_helpers.model.recorded import recorded_facts

SIZES = [(d_head, causal) for d_head in (64, 128, 256) for causal in (False, True)]
pytestmark = pytest.mark.skipif(find_tool("cuobjdump") is None, reason="no cuobjdump")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel cache of this module."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_ATTENTION_CACHE_DIR", str(folder))
        yield folder


@pytest.mark.compile
@pytest.mark.parametrize(("d_head", "causal"), SIZES)
def test_the_steady_loop_of_hopper_kernels(d_head: int, causal: bool) -> None:
    kernel = choose_hopper_kernel(DType.BF16, d_head, causal, 4096)[0]
    found = compile_facts(kernel, 90)
    # wgmma takes 16 of the reduction: d_head / 16 for Q K^T, B_c / 16 for P V.
    assert found.main_loop["HGMMA"] == d_head // 16 + kernel.config.B_c // 16
    # The producer's copies, and the next item's, are elsewhere.
    assert "TMA" not in found.main_loop
    assert "local" not in found.main_loop
    # A consumer's 64 x B_c scores in 128 threads, one exp2 each.
    assert found.main_loop["MUFU.EX2"] == kernel.config.B_c // 2
    assert found.main_loop["total"] < 700, (
        "without the block for growing scores, which hardly any tile enters"
    )
    recorded = recorded_facts(kernel, 90)
    assert recorded is not None
    assert (found.registers, found.spill_bytes) == (recorded.registers, recorded.spill_bytes)
    if recorded.instructions:
        assert found.instructions == pytest.approx(recorded.instructions, rel=0.05)


@pytest.mark.compile
@pytest.mark.parametrize(("d_head", "causal"), SIZES)
def test_the_main_loop_of_ampere_kernels(d_head: int, causal: bool) -> None:
    kernel = choose_ampere_kernel(DType.BF16, d_head, causal, 4096, (8, 0))[0]
    found = compile_facts(kernel, 80)
    assert found.main_loop["HMMA"] == kernel.config.products_per_block
    assert "local" not in found.main_loop
    scores = kernel.config.B_r * kernel.config.B_c // kernel.config.n_threads
    assert found.main_loop["MUFU.EX2"] == scores
    recorded = recorded_facts(kernel, 80)
    assert recorded is not None
    assert (found.registers, found.spill_bytes) == (recorded.registers, recorded.spill_bytes)
