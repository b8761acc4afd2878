"""C63 on a GPU: each weight is dropped or stays as on the CPU, forward and backward, by both families.

The weights themselves are seen: with values that name their key, an output is a row of weights, and with an
output gradient that names its query a gradient of the values is a column of them. All kernels are compiled at
the same time before the first test.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flash_attention
from flash_attention import sdpa
from flash_attention.backends import cuda_kernels
from flash_attention.cached import attention_cached
from flash_attention.call import Mask, Scores, problem_of
from flash_attention.errors import NoKernelError
from flash_attention.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from flash_attention.layouts import DENSE, Packed
from flash_attention.mods.philox import random_words
from flash_attention.mods.tracing import trace
from flash_helpers import build
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD, FORWARD, AttentionProblem
from flash_helpers.mods.philox import threshold
from flash_helpers.select.candidates import kernel_for, unable_reason
from flash_helpers.select.select import select

FAMILIES = ("ampere", "hopper")
PROBABILITIES = (0.1, 0.5, 0.999)
SEED = 2**40 + 20261129
BATCH = 2


def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Its derivative is below 0 in places, so that no sign is left to tell what is dropped."""
    return s * (0.5 - (k + q) % 3) + 0.01 * (k - q)


class Case(NamedTuple):
    """A kind of call.

    Attributes:
        lengths: queries and keys; of packed ones those of each sequence.
        options: of ``attention``.
    """

    dtype: torch.dtype
    d: int
    lengths: Any
    heads: tuple[int, int] = (4, 2)
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def packed(self) -> bool:
        return not isinstance(self.lengths[0], int)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        return list(self.lengths) if self.packed else [self.lengths] * BATCH

    def layout(self, device: str) -> Any:
        if not self.packed:
            return DENSE
        ends = [
            torch.tensor([0, *n], dtype=torch.int32, device=device).cumsum(0).int()
            for n in zip(*self.lengths, strict=True)
        ]
        return Packed(*ends, *(max(n) for n in zip(*self.lengths, strict=True)))

    def tensors(self, device: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        rows = [sum(n) for n in zip(*self.lengths, strict=True)] if self.packed else self.lengths
        shapes = [(rows[i > 0], self.heads[i > 0], self.d) for i in range(3)]
        if not self.packed:
            shapes = [(BATCH, *shape) for shape in shapes]
        return [torch.randn(*shape, generator=generator).to(device, self.dtype) for shape in shapes]

    def problem(self, direction: str, deterministic: bool = False) -> AttentionProblem:
        options = self.options
        mods = {name: options[name] for name in ("score_mod", "mask_mod") if name in options}
        traced = trace(**mods, device="cuda:0") if mods else None
        scores = Scores(self.d**-0.5, options.get("softcap", 0.0), options.get("sinks"), traced)
        mask = Mask.of(options.get("causal", False), options.get("window", (None, None)))
        tensors = self.tensors("cpu")
        found = problem_of(*tensors, mask, scores, self.layout("cpu"), lse=True, dropout=True)
        return found if direction == FORWARD else found.backward(deterministic)

    def attend(self, tensors: Any, p: float, seed: Tensor, **options: Any) -> Any:
        device = str(tensors[0].device)
        given = {**self.options, "dropout_p": p, "dropout_seed": seed, "return_lse": True, **options}
        if (sinks := given.get("sinks")) is not None:
            given["sinks"] = sinks.to(device)
        if self.packed:
            return flash_attention.attention_varlen(*tensors, *self.layout(device)[:4], **given)
        return flash_attention.attention(*tensors, **given)


FP16, BF16 = torch.float16, torch.bfloat16
CASES = {
    "plain": Case(FP16, 64, (70, 333)),
    "causal": Case(BF16, 64, (333, 333), options={"causal": True}),
    "wide": Case(BF16, 128, (129, 257), (4, 1), {"causal": True}),
    "score function": Case(FP16, 64, (130, 201), options={"score_mod": scaled}),
    "packed": Case(FP16, 64, ((5, 40), (0, 3), (300, 211), (17, 1)), options={"causal": True}),
    "wider": Case(FP16, 256, (65, 130)),
    "window": Case(BF16, 64, (301, 301), (2, 2), {"window": (70, 5)}),
    "soft cap": Case(BF16, 64, (200, 150), options={"softcap": 2.0}),
    "sinks": Case(FP16, 64, (70, 333), options={"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])}),
    "of odd size": Case(BF16, 40, (77, 90)),
}
REPEATABLE = ("plain", "causal", "packed")  # also with ordered sums of dQ


def kernel(problem: AttentionProblem, family: str, facts: DeviceFacts) -> Kernel | None:
    """What a family computes a problem with on a device; None: it does not run there."""
    for direction in directions(problem.direction):
        if direction.family.name == family and (found := direction.defaults(problem, facts)):
            config = found.whole[0]
            assert unable_reason(config, problem, [config]) is None
            return kernel_for(config, problem)
    return None


def few_queries() -> Case:
    return Case(FP16, 64, (1, 4099), (8, 2))


def all_kernels(facts: DeviceFacts) -> list[Kernel]:
    """Of all tests."""
    found: list[Kernel | None] = []
    for family in FAMILIES:
        for name, case in CASES.items():
            found.append(kernel(case.problem(FORWARD), family, facts))
            for deterministic in (False, True)[: 1 + (name in REPEATABLE)]:
                found.append(kernel(case.problem(BACKWARD, deterministic), family, facts))
    found.append(select(few_queries().problem(FORWARD), facts, explained=False).kernel)
    return list(dict.fromkeys(one for one in found if one is not None))


@pytest.fixture(scope="module")
def facts() -> DeviceFacts:
    own = cuda_kernels.device_facts_of(0)
    build.build_kernels(all_kernels(own), [own.target])
    return own


def seed_on(device: str) -> Tensor:
    return torch.tensor(SEED, device=device)


@functools.lru_cache(64)
def kept(b: int, heads: int, n_q: int, n_k: int, p: float) -> Tensor:
    """(heads, queries, keys): 0, or 1 / (1 - p), of one sequence."""
    words = random_words(
        seed_on("cpu"), torch.tensor(b), torch.arange(heads)[:, None, None], range(n_q), range(n_k)
    )
    return (words >= threshold(p)).double() / (1 - p)


def expected(case: Case, tensors: Any, p: float) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Output (queries, heads, d), LSE and dropped weights (heads, queries, keys) of each sequence, in float64
    and with a graph."""
    heads, heads_kv = case.heads
    found, first = [], [0, 0]
    for b, (n_q, n_k) in enumerate(case.sequences):
        if case.packed:
            q = tensors[0][first[0] : first[0] + n_q]
            k, v = (x[first[1] : first[1] + n_k] for x in tensors[1:])
            first = [first[0] + n_q, first[1] + n_k]
        else:
            q, k, v = (x[b] for x in tensors)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(heads // heads_kv, 0) for x in (k, v))
        found.append(_sequence(case.options, b, q, k, v, kept(b, heads, n_q, n_k, p)))
    return found


def _sequence(
    options: dict[str, Any], b: int, q: Tensor, k: Tensor, v: Tensor, stays: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    n_q, n_k = q.shape[1], k.shape[1]
    scores = q @ k.mT / math.sqrt(q.shape[2])
    rows, keys = torch.arange(n_q)[:, None], torch.arange(n_k)
    if cap := options.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    if scored := options.get("score_mod"):
        scores = scored(scores, b, torch.arange(q.shape[0])[:, None, None], rows, keys)
    left, right = options.get("window", (None, None))
    right = 0 if options.get("causal") else right
    place = rows + n_k - n_q
    hidden = torch.zeros(n_q, n_k, dtype=torch.bool)
    if left is not None:
        hidden |= keys < place - left
    if right is not None:
        hidden |= keys > place + right
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    if (sinks := options.get("sinks")) is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    unseen = lse == -math.inf
    weights = torch.exp(scores - lse.masked_fill(unseen, 0.0)[..., None]) * stays
    return (weights @ v).transpose(0, 1), lse, weights


def joined(case: Case, results: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output and LSE as a call returns them."""
    outs, lses, _ = zip(*results, strict=True)
    return (torch.cat(outs), torch.cat(lses, -1)) if case.packed else (torch.stack(outs), torch.stack(lses))


def configs(case: Case, family: str, facts: DeviceFacts, deterministic: bool = False) -> dict[str, Any]:
    own = [kernel(case.problem(d, deterministic), family, facts) for d in (FORWARD, BACKWARD)]
    if None in own:
        pytest.skip(f"kernels of the {family} family do not run on this device")
    return {"config": own[0].config, "backward_config": own[1].config}  # type: ignore[union-attr]


def names(x: Tensor, first: int) -> Tensor:
    """The like of a tensor of rows, in which row ``first + i`` has a 1 in column i, and nothing else is."""
    d = x.shape[-1]
    made = torch.zeros_like(x)
    rows = made.unsqueeze(0) if made.ndim == 3 else made
    n = max(0, min(d, rows.shape[1] - first))
    rows[:, first : first + n, :, :n] = torch.eye(d, dtype=x.dtype, device=x.device)[:n, None, :n]
    return made


# ---------------------------------------------------------------------- weights
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.packed])
def test_c63_each_weight_is_that_of_the_cpu(facts, name: str, family: str, p: float) -> None:
    case = CASES[name]
    own = configs(case, family, facts)
    q, k, v = case.tensors("cuda")
    right = torch.stack([weights for *_, weights in expected(case, [x.cpu().double() for x in (q, k, v)], p)])
    n_q, n_k = right.shape[-2:]
    found = torch.zeros_like(right)
    for first in range(0, n_k, case.d):  # the keys whose weights are seen
        out, _ = case.attend((q, k, names(v, first)), p, seed_on("cuda"), **own)
        n = min(case.d, n_k - first)
        found[..., first : first + n] = out.transpose(1, 2)[..., :n].cpu().double()
    # Weights beside which rounding leaves nothing are 0 on either side.
    seen = right > 1e-6 / (1 - p)
    assert torch.equal(found > 0, (right > 0) & (found > 0))
    assert (found > 0)[seen].all()
    torch.testing.assert_close(found * (1 - p), right * (1 - p), rtol=1e-2, atol=1e-6)

    grouped = torch.zeros(BATCH, case.heads[1], n_q, n_k, dtype=torch.float64)
    v = v.requires_grad_()
    out, _ = case.attend((q, k, v), p, seed_on("cuda"), **own)
    for first in range(0, n_q, case.d):  # the queries whose weights are seen, of each head of a group
        (dv,) = torch.autograd.grad(out, v, names(out, first), retain_graph=True)
        n = min(case.d, n_q - first)
        grouped[..., first : first + n, :] = dv.permute(0, 2, 3, 1)[:, :, :n].cpu().double()
    of_groups = right.unflatten(1, (case.heads[1], -1)).sum(2)
    assert torch.equal(grouped > 0, (of_groups > 0) & (grouped > 0))
    assert (grouped > 0)[of_groups > 1e-6 / (1 - p)].all()
    torch.testing.assert_close(grouped * (1 - p), of_groups * (1 - p), rtol=1e-2, atol=1e-5)


# ---------------------------------------------------------------------- outputs and gradients
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_c63_outputs_and_gradients(facts, name: str, deterministic: bool, family: str, p: float) -> None:
    if deterministic and name not in REPEATABLE:
        pytest.skip("ordered sums are tried in few cases")
    case = CASES[name]
    own = configs(case, family, facts, deterministic)
    grads: list[list[Tensor]] = []
    given: tuple[Tensor, Tensor] | None = None
    for repeat in range(2):
        tensors = [x.requires_grad_() for x in case.tensors("cuda")]
        out, lse = case.attend(tensors, p, seed_on("cuda"), deterministic=deterministic, **own)
        if given is None:
            wide = [x.detach().cpu().double().requires_grad_() for x in tensors]
            right = joined(case, expected(case, wide, p))
            scale = max(1.0, float(right[0].detach().abs().max()))
            tolerance = 4e-3 if case.dtype is FP16 else 1.6e-2
            torch.testing.assert_close(
                out.detach().cpu().double() / scale, right[0].detach() / scale, rtol=tolerance, atol=tolerance
            )
            torch.testing.assert_close(
                lse.detach().cpu().double(), right[1].detach(), rtol=1e-3, atol=1e-3, equal_nan=True
            )
            generator = torch.Generator().manual_seed(3)
            given = torch.randn(out.shape, generator=generator), torch.randn(lse.shape, generator=generator)
        dout, dlse = given[0].to("cuda", case.dtype), given[1].cuda()
        grads.append(list(torch.autograd.grad((out, lse), tensors, (dout, dlse))))
        if repeat == 0 and not deterministic:
            break
    assert given is not None
    seen = right[1] != -math.inf
    loss = (right[0] * given[0].to(case.dtype).double()).sum() + (
        right[1][seen] * given[1].double()[seen]
    ).sum()
    wanted = torch.autograd.grad(loss, wide)
    for x, y in zip(grads[0], wanted, strict=True):
        largest = float(y.abs().max()) or 1.0
        error = float((x.cpu().double() - y).abs().max())
        assert error <= (4e-3 if case.dtype is FP16 else 1.6e-2) * largest
    if deterministic:
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_a_probability_of_0_drops_nothing_and_compiles_nothing(facts, monkeypatch) -> None:
    q, k, v = CASES["plain"].tensors("cuda")
    plain = flash_attention.attention(q, k, v)
    monkeypatch.setattr(build, "build_kernels", None)
    assert torch.equal(flash_attention.attention(q, k, v, dropout_p=0.0, dropout_seed=seed_on("cuda")), plain)
    assert flash_attention.last_kernel().mod is None


def test_numbers_and_seeds_compile_nothing(facts, monkeypatch) -> None:
    case = CASES["plain"]
    tensors = case.tensors("cuda")
    own = configs(case, "ampere", facts)
    case.attend(tensors, 0.5, seed_on("cuda"), **own)
    monkeypatch.setattr(build, "build_kernels", None)
    results = []
    for i in range(20):
        p, seed = 0.04 * i + 0.01, torch.tensor(i % 10, device="cuda")
        results.append(case.attend(tensors, p, seed, **own)[0])
    assert not any(torch.equal(x, y) for x, y in zip(results[:10], results[10:], strict=True))


# ---------------------------------------------------------------------- seeds
def test_pytorchs_generator_gives_the_seed(facts) -> None:
    q, k, v = (x.requires_grad_() for x in CASES["plain"].tensors("cuda"))
    torch.manual_seed(5)
    first = flash_attention.attention(q, k, v, dropout_p=0.3)
    second = flash_attention.attention(q, k, v, dropout_p=0.3)
    torch.manual_seed(5)
    again = flash_attention.attention(q, k, v, dropout_p=0.3)
    assert torch.equal(again, first)
    assert not torch.equal(first, second)
    grads = [torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (first, again)]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3)


def test_each_replay_of_a_graph_draws_anew(facts) -> None:
    q, k, v = CASES["plain"].tensors("cuda")
    flash_attention.attention(q, k, v, dropout_p=0.3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attention.attention(q, k, v, dropout_p=0.3)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(out.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


# ---------------------------------------------------------------------- by other names, in other layouts
def close(found: Tensor, right: Tensor, tolerance: float = 6e-3) -> None:
    torch.testing.assert_close(found.cpu().double(), right.double(), rtol=tolerance, atol=tolerance)


def test_the_names_of_pytorch_and_flash_attn(facts) -> None:
    case = Case(FP16, 64, (90, 90))
    q, k, v = case.tensors("cuda")
    ends = torch.tensor([0, 90, 180], dtype=torch.int32, device="cuda")
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    calls = {
        "sdpa": lambda: sdpa(
            *(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.3, enable_gqa=True
        ).transpose(1, 2),
        "func": lambda: flash_attn_func(q, k, v, 0.3),
        "varlen": lambda: flash_attn_varlen_func(*packed, ends, ends, 90, 90, 0.3).view(q.shape),
    }
    for call in calls.values():
        torch.manual_seed(3)
        seed = torch.empty((), dtype=torch.int64, device="cuda").random_().cpu()
        torch.manual_seed(3)
        right = flash_attention.attention(*(x.cpu() for x in (q, k, v)), dropout_p=0.3, dropout_seed=seed)
        close(call(), right)


def test_few_queries_whose_keys_are_split(facts) -> None:
    case = few_queries()
    tensors = case.tensors("cuda")
    found = case.attend(tensors, 0.3, seed_on("cuda"))
    assert flash_attention.last_kernel().traits.split
    right = case.attend([x.cpu() for x in tensors], 0.3, seed_on("cpu"))
    for x, y in zip(found, right, strict=True):
        close(x, y)


def test_caches_and_pages_count_their_own_places(facts) -> None:
    q, _, _ = Case(FP16, 64, (7, 7)).tensors("cuda")
    generator = torch.Generator().manual_seed(1)
    pages = [torch.randn(9, 32, 2, 64, generator=generator).half() for _ in range(2)]
    used = torch.tensor([120, 20], dtype=torch.int32)
    table = torch.tensor([[8, 2, 5, 1], [3, 0, 7, 4]]).int()
    for there in ({}, {"block_table": table}):
        keys = pages if there else [x[:8].view(2, 128, 2, 64) for x in pages]
        call = [q.cpu(), *keys, used]
        options = {"dropout_p": 0.3, "causal": True}
        found = attention_cached(
            *(x.cuda() for x in call),
            **{name: x.cuda() for name, x in there.items()},
            dropout_seed=seed_on("cuda"),
            **options,
        )
        close(found, attention_cached(*call, dropout_seed=seed_on("cpu"), **there, **options))


def test_packed_queries_over_a_cache_are_refused(facts) -> None:
    q, k, v = Case(FP16, 64, (7, 40)).tensors("cuda")
    ends = torch.tensor([0, 7, 14], dtype=torch.int32, device="cuda")
    used = torch.tensor([40, 20], dtype=torch.int32, device="cuda")
    with pytest.raises(NoKernelError, match=r"dropout_p.* for packed queries over a cache"):
        flash_attention.attention_varlen(
            q.flatten(0, 1), k, v, ends, None, 7, 40, seqused_k=used, dropout_p=0.3
        )
