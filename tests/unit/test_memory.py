"""Overlap and alignment of strided tensors, against enumeration."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attention.checks.memory import misalignment, overlap, overlaps_itself, span_bytes


def addresses(x: torch.Tensor) -> list[int]:
    """Every element's address, by enumeration."""
    offsets = [0]
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = [o + i * stride for o in offsets for i in range(size)]
    return [x.data_ptr() + 2 * o for o in offsets]


views = st.tuples(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=2, max_size=2),
    st.integers(0, 40),
    st.integers(1, 4),
)


@settings(max_examples=300, deadline=None)
@given(views, views)
def test_overlap_is_exact(a, b):
    storage = torch.zeros(256, dtype=torch.float16)
    x, y = (
        storage.as_strided((*(n for n, _ in dims), last), (*(s for _, s in dims), 1), offset)
        for dims, offset, last in (a, b)
    )
    assert overlap(x, y) == bool(set(addresses(x)) & set(addresses(y)))


@settings(max_examples=300, deadline=None)
@given(views)
def test_self_overlap_is_never_missed(a):
    dims, offset, last = a
    x = torch.zeros(256, dtype=torch.float16).as_strided(
        (*(n for n, _ in dims), last), (*(s for _, s in dims), 1), offset
    )
    if len(set(addresses(x))) < x.numel():
        assert overlaps_itself(x)


def test_dense_views_do_not_overlap_themselves():
    x = torch.zeros(2, 3, 4, 8, dtype=torch.float16)
    for view in (x, x.transpose(1, 2), x[:, ::2], x[..., :4], x[:0]):
        assert not overlaps_itself(view)
    assert overlaps_itself(x[:, :1].expand(2, 3, 4, 8))


def test_span():
    x = torch.zeros(4, 8, dtype=torch.float16)
    assert span_bytes(x) == 64
    assert span_bytes(x[::3, :2]) == 2 * (3 * 8 + 2)
    assert span_bytes(x[:0]) == 0


def test_misalignment_names_the_reason():
    x = torch.zeros(4, 24, dtype=torch.float16)
    assert misalignment(x) is None
    assert "8 bytes" in (misalignment(x[:, 4:12]) or "")
    assert "stride of dimension 0 is 12" in (misalignment(x.view(8, 12)) or "")
    assert misalignment(x.view(8, 12)[:1]) is None
