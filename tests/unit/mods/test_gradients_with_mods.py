"""Autograd through functions of the user's: q, k, v and what is captured, on the CPU, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gallery import GALLERY, causal
from mod_gradients import (
    SCORES,
    dense_gradients,
    float64_gradients,
    for_each_score,
    mask,
    random_case,
    tables,
)
from torch import Tensor

import flash_attention
from flash_attention.cached import attention_cached
from flash_helpers.test.reference import reference

BATCH, HEADS, HEADS_KV, D = 2, 4, 2, 16
SEQ_Q, SEQ_K = 60, 100


def inputs(seq_q: int = SEQ_Q, seq_k: int = SEQ_K, seed: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((seq_q, HEADS), (seq_k, HEADS_KV), (seq_k, HEADS_KV))
    made = [torch.randn(BATCH, n, h, D, generator=generator).half() for n, h in shapes]
    return [x.requires_grad_() for x in made]


def losses(out: Tensor, lse: Tensor, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Gradients of the results."""
    generator = torch.Generator().manual_seed(seed)
    dlse = torch.randn(lse.shape, generator=generator).masked_fill(lse.detach() == -math.inf, 0.0)
    return torch.randn(out.shape, generator=generator).half(), dlse


def close(found: Any, expected: Any, tolerance: float = 4e-3) -> None:
    for x, y in zip(found, expected, strict=True):
        scale = max(y.abs().max().item(), 1e-3) if y.numel() else 1.0
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance * scale)


def with_tables(name: str, learnt: dict[str, Tensor]) -> Any:
    return lambda s, b, h, q, k: SCORES[name](s, b, h, q, k, learnt)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_attention(name: str, masked: bool) -> None:
    options = {"window": (50, 15), "softcap": 2.0} if name in ("by distance", "nonlinear") else {}
    options["mask_mod"] = mask if masked else None
    q, k, v = inputs()
    learnt = {n: t.requires_grad_() for n, t in tables().items()}
    results = flash_attention.attention(
        q, k, v, score_mod=with_tables(name, learnt), return_lse=True, **options
    )
    own = (q, k, v, *learnt.values())
    found = torch.autograd.grad(results, own, losses(*results), allow_unused=True)
    expected = float64_gradients(SCORES[name], (q, k, v), learnt, losses(*results), **options)
    for x, got, wanted in zip(own, found, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert (got.dtype, got.shape) == (x.dtype, x.shape)
            close([got], [wanted])


def test_the_float64_reference_itself() -> None:
    """By differences, so that a wrong gradient cannot be wrong twice in the same way."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 4, h, 2, generator=generator, dtype=torch.float64) for h in (2, 1, 1))
    table = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    own = [x.requires_grad_() for x in (q, k, v, table)]

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        score_mod = lambda s, b, h, i, j: s * torch.sigmoid(table[h, i - j + 4]) + table[h, j]  # noqa: E731
        return reference(q, k, v, score_mod=score_mod, mask_mod=lambda b, h, i, j: i >= j)

    assert torch.autograd.gradcheck(call, own)


def test_packed_sequences() -> None:
    lengths = [(5, 40), (0, 3), (60, 60), (17, 1), (4, 0)]
    ends = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in zip(*lengths, strict=True)]
    q, k, v = (x[0].detach() for x in inputs(int(ends[0][-1]) + 3, int(ends[1][-1]) + 2))
    learnt = {n: t.requires_grad_() for n, t in tables().items()}
    own = [x.requires_grad_() for x in (q, k, v)]
    name = "nonlinear"

    def scored(s, b, h, q, k, t, item=0):
        return SCORES[name](s, b, h, q, k, t) + t["slopes"][(b + item) % 4] * k * 0.01

    results = flash_attention.attention_varlen(
        *own, *ends, 60, 60, return_lse=True, mask_mod=mask,
        score_mod=lambda s, b, h, q, k: scored(s, b, h, q, k, learnt),
    )  # fmt: skip
    out, lse = results
    dout, dlse = losses(out, lse)
    found = torch.autograd.grad(results, (*own, *learnt.values()), (dout, dlse), allow_unused=True)
    of_tables: list[Any] = [0.0, None, None, 0.0]
    for i, (n_q, n_k) in enumerate(lengths):
        rows, keys = slice(ends[0][i], ends[0][i] + n_q), slice(ends[1][i], ends[1][i] + n_k)
        parts = [x.detach()[None, part] for x, part in zip(own, (rows, keys, keys), strict=True)]
        *grads, slopes, _, _, few = float64_gradients(
            lambda *args, i=i: scored(*args, item=i), parts, learnt, (dout[None, rows], dlse[None, :, rows]),
            mask_mod=lambda b, h, q, k, i=i: mask(b + i, h, q, k),
        )  # fmt: skip
        close([found[0][rows], found[1][keys], found[2][keys]], [g[0] for g in grads])
        if n_q and n_k:
            of_tables = [of_tables[0] + slopes, None, None, of_tables[3] + few]
    close([found[3], found[6]], [of_tables[0], of_tables[3]])
    assert not any(x[ends[1][-1] :].any() for x in found[1:3])


def test_caches() -> None:
    q, k, v = inputs(3, 48)
    used = torch.tensor([48, 20], dtype=torch.int32)
    learnt = {n: t.requires_grad_() for n, t in tables().items()}
    results = attention_cached(q, k, v, used, return_lse=True, score_mod=with_tables("alibi", learnt))
    dout, dlse = losses(*results)
    found = torch.autograd.grad(results, (q, k, v, learnt["slopes"]), (dout, dlse))
    total = 0.0
    for i, n in enumerate(used.tolist()):
        one = slice(i, i + 1)
        parts = [x.detach()[one, :m] for x, m in ((q, 3), (k, n), (v, n))]
        *grads, slopes, _, _, _ = float64_gradients(SCORES["alibi"], parts, learnt, (dout[one], dlse[one]))
        close([found[0][one], found[1][one, :n], found[2][one, :n]], grads)
        total = total + slopes
        assert not found[1][i, n:].any()
    close([found[3]], [total])


@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery(name: str) -> None:
    kind, function = GALLERY[name]
    mods = {"score_mod" if kind == "score" else "mask_mod": function}
    q, k, v = inputs(64, 64)
    results = flash_attention.attention(q, k, v, return_lse=True, **mods)
    given = losses(*results)
    found = torch.autograd.grad(results, (q, k, v), given)
    wide = {name: for_each_score(made, kind == "score") for name, made in mods.items()}
    close(found, dense_gradients((q, k, v), given, **wide))


SHARE = 4  # 4 x 250 random functions


@pytest.mark.parametrize("share", range(SHARE))
def test_random_functions(share: int) -> None:
    for seed in range(share, 1000, SHARE):
        case = random_case(seed, torch.device("cpu"))
        results = flash_attention.attention(*case.inputs, return_lse=True, **case.mods)
        given = losses(*results, seed=seed)
        own = (*case.inputs, *case.learnt)
        found = torch.autograd.grad(results, own, given, allow_unused=True)
        expected = case.expected(given)
        for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
            # A table's gradient is a sum of hundreds, which may be near 0 where these are not.
            scale = max(wanted.abs().max().item(), 1e-2 if i < 3 else 0.5)
            got = torch.zeros(()) if got is None else got
            torch.testing.assert_close(
                torch.broadcast_to(got, wanted.shape).double(), wanted, rtol=1e-2, atol=1e-2 * scale,
                msg=lambda m, case=case: f"{case.text}\n{m}",
            )  # fmt: skip


# ---------------------------------------------------------------------- autograd's side
def alibi_call(learnt: Tensor, calls: list[int] | None = None, **options: Any) -> tuple[Any, list[Tensor]]:
    def add(s, b, h, q, k):
        if calls is not None:
            calls.append(1)
        return s + learnt[h] * (k - q)

    made = inputs(20, 20)
    return flash_attention.attention(*made, score_mod=add, **options), made


def test_a_function_is_called_once_for_both_passes() -> None:
    calls: list[int] = []
    out, _ = alibi_call(torch.zeros(HEADS, requires_grad=True), calls)
    out.sum().backward()
    assert calls == [1]


def test_gradients_that_nobody_wants_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_attention.mods.gradients import ScoreDerivative

    wanted: list[tuple[int, ...]] = []
    of = ScoreDerivative.of.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        ScoreDerivative, "of", classmethod(lambda cls, t, w=(): wanted.append(w) or of(cls, t, w))
    )
    learnt = torch.zeros(HEADS, requires_grad=True)
    out, made = alibi_call(learnt.detach())
    out.sum().backward()
    assert all(x.grad is not None for x in made)
    assert learnt.grad is None
    out, made = alibi_call(learnt)
    (alone,) = torch.autograd.grad(out.sum(), learnt)
    assert wanted == [(), (0,)]
    out, made = alibi_call(learnt)
    *_, beside = torch.autograd.grad(out.sum(), (*made, learnt))
    assert torch.equal(alone, beside)
    with torch.no_grad():
        out, _ = alibi_call(learnt)
    assert not out.requires_grad


def test_equal_calls_give_equal_bits() -> None:
    def grads() -> list[Tensor]:
        learnt = torch.linspace(0, 1, HEADS).requires_grad_()
        out, made = alibi_call(learnt)
        out.sum().backward()
        return [x.grad for x in (*made, learnt)]

    assert all(torch.equal(a, b) for a, b in zip(grads(), grads(), strict=True))


def test_a_tensor_made_of_parameters_and_one_captured_twice() -> None:
    parameter = torch.linspace(-1, 1, HEADS).requires_grad_()
    made = parameter * 2.0

    def scored(s, b, h, q, k):
        return s + made[h] * k * 0.01 + parameter[h] * q * 0.0 + made[(h + 1) % 4] * 0.1 * (k % 3)

    q, k, v = inputs(20, 20)
    out = flash_attention.attention(q, k, v, score_mod=scored)
    (found,) = torch.autograd.grad(out.sum(), parameter)
    rule = lambda s, b, h, q, k, t: scored_with(s, h, k, t["p"] * 2.0)  # noqa: E731

    def scored_with(s, h, k, made):
        return s + made[h] * k * 0.01 + made[(h + 1) % 4] * 0.1 * (k % 3)

    ones = (torch.ones_like(out), torch.zeros(BATCH, HEADS, 20))
    close([found], float64_gradients(rule, (q, k, v), {"p": parameter.detach()}, ones)[3:])


def test_captured_tensors_that_are_changed_in_between_are_an_error() -> None:
    learnt = torch.zeros(HEADS, requires_grad=True)
    out, _ = alibi_call(learnt)
    with torch.no_grad():
        learnt.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    document = torch.arange(20) // 7
    q, k, v = inputs(20, 20)
    out = flash_attention.attention(q, k, v, mask_mod=lambda b, h, i, j: document[i] == document[j])
    document[3] = 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused() -> None:
    learnt = torch.zeros(HEADS, requires_grad=True)
    q, k, v = (x.detach() for x in inputs(20, 20))
    out = flash_attention.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + learnt[h] * j)
    (grad,) = torch.autograd.grad(out.sum(), learnt, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of attention's gradients"):
        grad.sum().backward()


def test_options_without_gradients_are_refused_where_only_a_table_wants_one() -> None:
    learnt = torch.zeros(HEADS, requires_grad=True)
    q, k, v = (x.detach() for x in inputs(20, 20))
    with pytest.raises(NotImplementedError, match=r"out=.*place"):
        flash_attention.attention(
            q, k, v, out=torch.empty_like(q), score_mod=lambda s, b, h, i, j: s + learnt[h]
        )


def test_hidden_keys_and_rows_have_gradients_of_exactly_0() -> None:
    learnt = torch.tensor([0.0, -1.0, 4.0, 9.0], requires_grad=True)  # whose roots have no finite slope

    def scored(s, b, h, q, k):
        return torch.where(h >= 2, s + torch.sqrt(learnt[h]), -math.inf)

    q, k, v = inputs(20, 20)
    seen = lambda b, h, i, j: (i != 4) & (j != 7)  # noqa: E731
    out = flash_attention.attention(q, k, v, score_mod=scored, mask_mod=seen)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v, learnt))
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][:, 4].any()
    assert not grads[0][:, :, :2].any()
    assert not any(x[:, 7].any() for x in grads[1:3])
    assert not any(x[:, :, 0].any() for x in grads[1:3])
    assert not grads[3][:2].any()
    assert grads[0].any()


@pytest.mark.parametrize("sizes", [(0, 9), (9, 0)])
def test_calls_without_queries_or_keys(sizes: tuple[int, int]) -> None:
    learnt = torch.ones(HEADS, requires_grad=True)
    own = (*inputs(*sizes), learnt)
    out = flash_attention.attention(*own[:3], score_mod=lambda s, b, h, q, k: s + learnt[h], mask_mod=causal)
    assert not any(x.any() for x in torch.autograd.grad(out.sum(), own))
