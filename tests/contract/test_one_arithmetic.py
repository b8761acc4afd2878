"""Line C74 of docs/contract.md: with ``numerics="invariant"`` a query has the same bits in every call."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from flash_attention import attention, last_kernel
from flash_helpers.test.invariance import VIEWS, Limits, differing_rows, pairs_of, scene_of

LIMITS = Limits(
    most_keys=600,
    heads=((2, 1), (2, 2)),
    head_sizes=((64, 64), (40, 72)),
    masks=((True, (None, None)), (False, (None, None)), (True, (100, None)), (False, (50, 20))),
    softcaps=(0.0, 20.0),
    sinks=(False, True),
    dtypes=(torch.float16, torch.bfloat16),
)


@pytest.mark.parametrize("view", VIEWS[1:], ids=lambda view: view.__name__)
def test_c74_each_view_has_the_bits_of_the_whole(view) -> None:
    rng = random.Random(1)
    for _ in range(3):
        scene = scene_of(rng, "cpu", LIMITS)
        last = rng.randint(1, scene.n)
        for first in {max(0, last - 70), last - 1}:  # a chunk, and decoding
            expected = VIEWS[0](scene, first, last, rng)
            assert differing_rows(expected, view(scene, first, last, rng)) == 0, scene.text


def test_c74_random_pairs() -> None:
    pairs = list(itertools.islice(pairs_of(2, "cpu", LIMITS), 40))
    assert [pair.text for pair in pairs if pair.differing] == []
    assert sum(pair.rows for pair in pairs) > 200


def test_c74_without_it_bits_differ() -> None:
    """The pairs above would show a difference: without the keyword there are some."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64).half() for _ in range(3))
    whole, lse = attention(q, k, v, causal=True, return_lse=True)
    rows = [attention(q[:, i : i + 1], k[:, : i + 1], v[:, : i + 1], return_lse=True) for i in range(300)]
    out = torch.cat([o for o, _ in rows], 1)
    assert not (torch.equal(whole, out) and torch.equal(lse, torch.cat([x for _, x in rows], 2)))


def test_c74_the_result_is_right() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 90, 2, 64).bfloat16() for _ in range(3))
    out, lse = attention(q, k, v, causal=True, return_lse=True, numerics="invariant")
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    assert (out.double() - exact).abs().max() < 2e-2
    assert last_kernel() is not None
    fast = attention(q, k, v, causal=True, return_lse=True, numerics="fast")
    assert (lse - fast[1]).abs().max() < 1e-5


@pytest.mark.parametrize("d", [8, 24, 40, 72, 88, 104])
def test_c74_numbers_of_threads_change_no_bit(d: int) -> None:
    """MKL divides the columns of a product among threads, and adds up odd ones in another order."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 300, 1, d).half() for _ in range(3))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 4, 8, 24):
            torch.set_num_threads(threads)
            results.append(attention(q, k, v, causal=True, return_lse=True, numerics="invariant"))
    finally:
        torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_c74_gradients_go_with_it() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 40, 2, 64).bfloat16() for _ in range(3))
    leaf = q.clone().requires_grad_()
    out = attention(leaf, k, v, causal=True, numerics="invariant")
    assert torch.equal(out.detach(), attention(q, k, v, causal=True, numerics="invariant"))
    out.float().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"score_mod": lambda score, b, h, i, j: score * 2}, "score_mod"),
        ({"mask_mod": lambda b, h, i, j: i >= j}, "mask_mod"),
        ({"dropout_p": 0.1}, "dropout_p"),
    ],
)
def test_c74_what_no_invariant_kernel_has_is_refused(options, name) -> None:
    q = torch.randn(1, 8, 2, 64).half()
    with pytest.raises(NotImplementedError, match=f"{name} is given with numerics='invariant'"):
        attention(q, q, q, numerics="invariant", **options)


@pytest.mark.parametrize(("value", "error"), [("exact", ValueError), (True, TypeError), (1, TypeError)])
def test_c74_other_words_are_refused(value, error) -> None:
    q = torch.randn(1, 8, 2, 64).half()
    with pytest.raises(error, match=r"numerics is .*'invariant'"):
        attention(q, q, q, numerics=value)
