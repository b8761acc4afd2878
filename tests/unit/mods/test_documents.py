"""Masks of documents: which ones are read as such, and the runs of places that a tensor says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attention.call import Mask, Scores
from flash_attention.layouts import Packed
from flash_attention.mods import and_masks, trace
from flash_attention.run import documents
from flash_attention.run.document_calls import PackedForm
from flash_helpers.mods.documents import DocumentForm, document_form
from flash_helpers.mods.plain_forms import Band

ONE, BY_ITEM, OTHER = torch.arange(40) // 7, torch.arange(80).view(2, 40) // 7, torch.zeros(40).long()
BEGINS = torch.tensor([0, 7, 14, 21, 28, 35], dtype=torch.int32)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def same(b: Any, h: Any, q: Any, k: Any) -> Any:
    return ONE[q] == ONE[k]


def within(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Places that are counted from where the document begins, as attention-gym's are."""
    q, k = q - BEGINS[ONE[q]], k - BEGINS[ONE[k]]
    return (q >= k) & (q - k <= 5)


def doubled(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Of which sums wrap around."""
    i, j = BEGINS[ONE[q]], BEGINS[ONE[k]]
    for _ in range(40):
        i, j = i + i, j + j
    return (ONE[q] == ONE[k]) & (q - i >= k - j)


READ: dict[str, tuple[Callable[..., Any], DocumentForm]] = {
    "one tensor": (same, DocumentForm(0, False, Band())),
    "the other way": (lambda b, h, q, k: ONE[k] == ONE[q], DocumentForm(0, False, Band())),
    "by item": (lambda b, h, q, k: BY_ITEM[b, q] == BY_ITEM[b, k], DocumentForm(0, True, Band())),
    "row of an item": (lambda b, h, q, k: BY_ITEM[b][q] == BY_ITEM[b][k], DocumentForm(0, True, Band())),
    "causal": (and_masks(causal, same), DocumentForm(0, False, Band(high=0))),
    "window": (
        lambda b, h, q, k: (q - k <= 9) & same(b, h, q, k) & (k - q <= 3) & same(b, h, q, k),
        DocumentForm(0, False, Band(-9, 3)),
    ),
    "places within": (and_masks(same, within), DocumentForm(0, False, Band(-5, 0))),
    "distance within": (
        lambda b, h, q, k: same(b, h, q, k) & (torch.abs((q - BEGINS[ONE[q]]) - (k - BEGINS[ONE[k]])) <= 4),
        DocumentForm(0, False, Band(-4, 4)),
    ),
    "places within, in 64 bits": (
        lambda b, h, q, k: (ONE[q] == ONE[k]) & (q - OTHER[ONE[q]] >= k - OTHER[ONE[k]]),
        DocumentForm(0, False, Band(high=0), (1,)),
    ),
    "places within, the other way": (and_masks(within, same), DocumentForm(0, False, Band(-5, 0))),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "two tensors": lambda b, h, q, k: ONE[q] == OTHER[k],
    "both of two": lambda b, h, q, k: (ONE[q] == ONE[k]) & (OTHER[q] == OTHER[k]),
    "by head": lambda b, h, q, k: BY_ITEM[h, q] == BY_ITEM[h, k],
    "another place": lambda b, h, q, k: ONE[q] == ONE[k + 1],
    "another item": lambda b, h, q, k: BY_ITEM[b, q] == BY_ITEM[0, k],
    "before": lambda b, h, q, k: ONE[q] >= ONE[k],
    "or causal": lambda b, h, q, k: (ONE[q] == ONE[k]) | (q >= k),
    "not these": lambda b, h, q, k: ONE[q] != ONE[k],
    "and padding": lambda b, h, q, k: (ONE[q] == ONE[k]) & (ONE[k] > 0),
    "real numbers": lambda b, h, q, k: ONE.float()[q] == ONE.float()[k],
    "a band": causal,
    "one place within": lambda b, h, q, k: (ONE[q] == ONE[k]) & (q - BEGINS[ONE[q]] >= k),
    "twice within": lambda b, h, q, k: (ONE[q] == ONE[k]) & (q - 2 * BEGINS[ONE[q]] >= k - BEGINS[ONE[k]]),
    "places within others": within,
    "within another": lambda b, h, q, k: (ONE[q] == ONE[k]) & (q - BEGINS[ONE[q]] >= k - BEGINS[ONE[k] - 1]),
    "within, by place": lambda b, h, q, k: (ONE[q] == ONE[k]) & (q - BEGINS[q] >= k - BEGINS[k]),
    "a part of the document": lambda b, h, q, k: (ONE[q] == ONE[k]) & (BEGINS[ONE[q]] <= 9),
    "another part": lambda b, h, q, k: (ONE[q] == ONE[k]) & (torch.abs(BEGINS[ONE[k]]) <= 9),
    "a distance of it": lambda b, h, q, k: (ONE[q] == ONE[k]) & (torch.abs(q - k) <= BEGINS[ONE[k]]),
    "within, too often": doubled,
    "columns": lambda b, h, q, k: BY_ITEM[q, b] == BY_ITEM[k, b],
}


@pytest.mark.parametrize("name", READ)
def test_masks_of_documents(name: str) -> None:
    mask, expected = READ[name]
    made = trace(mask_mod=mask)
    form = document_form(made.mod, made.numbers)
    assert form is not None
    assert form._replace(tensor=0) == expected
    assert made.tensors[form.tensor] is (BY_ITEM if form.by_item else ONE)
    assert all(made.tensors[place] is OTHER for place in form.small)
    assert documents.contents_of(made) == ((form.tensor, *form.small),)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks(name: str) -> None:
    made = trace(mask_mod=OTHERS[name])
    assert document_form(made.mod, made.numbers) is None
    assert documents.contents_of(made) == ()


def test_a_score_beside_the_mask_counts_places_of_the_item() -> None:
    made = trace(lambda s, b, h, q, k: s + (k - q), same)
    assert document_form(made.mod, made.numbers) is None


# ---------------------------------------------------------------------- runs of places
def read(numbers: Tensor, batch: int) -> tuple[list[int], int]:
    found = documents._read(numbers, batch, [numbers])
    assert found.offsets.dtype is torch.int32
    assert found.offsets.tolist() == [found.ends.tolist()]
    (owner,) = found.owners
    assert owner() is numbers
    return found.ends.tolist(), found.longest


def test_runs_of_each_item() -> None:
    assert read(torch.tensor([[3, 3, -1, 0, 0, 0]]), 1) == ([0, 2, 3, 6], 3)
    assert read(torch.tensor([[3, 3, -1, 0, 0, 0]]), 2) == ([0, 2, 3, 6, 8, 9, 12], 3)
    assert read(torch.tensor([[1, 1, 2], [2, 3, 3]]), 2) == ([0, 2, 3, 4, 6], 2)  # items share no document
    assert read(torch.tensor([[True, False, False]]), 1) == ([0, 1, 3], 2)


def test_runs_of_items_that_are_calls() -> None:
    """Each has offsets of its own rows, with empty documents behind where another one has more."""
    unlike = torch.tensor([[1, 1, 2, 2], [2, 3, 3, 4]])
    found = documents._read(unlike, 1, [unlike], apart=True)
    assert found.offsets.dtype is torch.int32
    assert found.offsets.tolist() == [[0, 2, 4, 4], [0, 1, 3, 4]]
    assert found.ends.tolist() == [0, 2, 4, 5, 7, 8]
    assert (found.longest, found.pairs) == (2, (8 + 6) / 2)
    found = documents._read(unlike[:1], 1, [unlike], apart=True)
    assert (found.offsets.tolist(), found.ends.tolist(), found.pairs) == ([[0, 2, 4]], [0, 2, 4], 8)
    assert documents._read(unlike[:1], 2, [unlike]).pairs == 8


def test_calls_of_items_take_views() -> None:
    x, lse = torch.zeros(2, 3, 4, 5).transpose(1, 2), torch.zeros(2, 3, 4)
    layout = Packed(BEGINS, BEGINS, 7, 7)
    form = PackedForm(Mask(), Scores(1.0), (layout, layout))
    assert form.kept is None
    assert form.rows(None) == form.lse_rows(None) == (None, None)
    for item in range(2):
        for found, expected in ((form.rows(x)[item], x[item]), (form.lse_rows(lse)[item], lse[item])):
            assert found.data_ptr() == expected.data_ptr()
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())


def test_the_call_of_all_items_takes_their_rows() -> None:
    x, lse = torch.zeros(2, 4, 3, 5), torch.zeros(3, 2, 4).transpose(0, 1)
    form = PackedForm(Mask(), Scores(1.0), (Packed(BEGINS, BEGINS, 7, 7),))
    (rows,), (lse_rows,) = form.rows(x), form.lse_rows(lse)
    assert form.kept is BEGINS
    assert (rows.shape, rows.data_ptr()) == ((8, 3, 5), x.data_ptr())
    assert (lse_rows.shape, lse_rows.data_ptr()) == ((3, 8), lse.data_ptr())


def test_small_numbers() -> None:
    assert documents._is_small(torch.tensor([2**31 - 1, -(2**31)]))
    assert documents._is_small(torch.zeros(0).long())
    assert not documents._is_small(torch.tensor([0, 2**31]))
    assert not documents._is_small(torch.tensor([0, -(2**31) - 1]))


def test_a_default_device_changes_nothing() -> None:
    numbers = torch.tensor([[1, 1, 2]])
    with torch.device("meta"):
        found = documents._read(numbers, 2, [numbers])
        assert documents._time_of_mask(found, 3, 64) > 0
    assert found.ends.tolist() == [0, 2, 3, 5, 6]


def test_a_number_that_stands_twice_is_no_run() -> None:
    assert read(torch.tensor([[1, 2, 1]]), 1)[1] == 0
    assert read(torch.tensor([[1, 1, 2], [3, 2, 3]]), 2)[1] == 0


# ---------------------------------------------------------------------- which way is quicker
def of_lengths(*lengths: int) -> documents.Documents:
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return documents._read(numbers[None], 1, [numbers])


@pytest.mark.parametrize("d_head", [64, 128])
def test_time_of_a_mask_beside_packed_sequences(d_head: int) -> None:
    """The first are those of 4096 tokens in benchmarks/results/h200-mods-documents.json."""
    long = of_lengths(308, 352, 452, 460, 1120, 704, 424, 276)
    assert documents._time_of_mask(long, 4096, d_head) > 1.1
    short = of_lengths(*[16] * 256)
    assert documents._time_of_mask(short, 4096, d_head) < documents.LEAST_WITH_GRADIENTS
    one = of_lengths(4096)
    assert documents._time_of_mask(one, 4096, d_head) == pytest.approx(1.0)


def test_time_counts_places_within_an_item() -> None:
    of_one, of_two = of_lengths(300, 212), documents._read(torch.arange(512)[None] // 300, 2, [ONE])
    alike = documents._time_of_mask(of_one, 512, 128), documents._time_of_mask(of_two, 512, 128)
    assert alike[0] == pytest.approx(alike[1])
