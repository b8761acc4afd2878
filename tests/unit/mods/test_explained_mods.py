"""What is said of a mod: where captured tensors of 64 bits make arithmetic on each element wide."""

from __future__ import annotations

import pytest
import torch

from flash_attention.mods.tracing import trace
from flash_helpers.mods.text import explained, wide_tensors

PLACES = torch.arange(20)
DOCUMENT = {dtype: (PLACES // 7).to(dtype) for dtype in (torch.int64, torch.int32, torch.int8)}


@pytest.mark.parametrize("dtype", DOCUMENT)
def test_elements_of_64_bits_are_named(dtype: torch.dtype) -> None:
    document = DOCUMENT[dtype]
    mod = trace(None, lambda b, h, q, k: document[q] == document[k]).mod
    wide = dtype is torch.int64
    assert wide_tensors(mod) == ((0,) if wide else ())
    assert ("64 bits, as what t0 holds; of int32 it would have 32" in explained(mod)) is wide


def test_what_costs_nothing_for_each_element_is_not_named() -> None:
    document = DOCUMENT[torch.int64]
    of_rows = trace(None, lambda b, h, q, k: (document[q] < 2) & (q >= k)).mod
    bounded = trace(None, lambda b, h, q, k: torch.clamp(document[q], 0, 9) == k).mod
    assert wide_tensors(of_rows) == wide_tensors(bounded) == ()
