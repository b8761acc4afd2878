"""Values that keep their hash, pickled: another process hashes text in another way."""

from __future__ import annotations

import pickle

import pytest

from flash_attention.distributed import Layout
from flash_attention.mods.tracing import trace
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import kernel_of
from flash_helpers.kernels.ladders import get_ladder

VALUES = {
    "forward kernel": lambda: kernel_of(get_ladder("hopper", DType.BF16, 128, False)[0].config),
    "backward kernel": lambda: kernel_of(get_ladder("ampere_backward", DType.BF16, 64, True)[0].config),
    "mod": lambda: trace(score_mod=lambda s, b, h, q, k: s * 2.0 + (q - k)).mod,
    "layout": lambda: Layout.zigzag(64, 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_another_process_pickled_is_found(name: str) -> None:
    value, other = VALUES[name](), VALUES[name]()
    hash(other)  # it is kept from here on
    other.__dict__["_hash"] = hash(other) + 1  # as another process has it
    found = pickle.loads(pickle.dumps(other))
    assert found == value
    assert {value: "here"}[found] == "here"
