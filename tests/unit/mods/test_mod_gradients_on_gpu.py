"""Backward kernels of each family with functions of the user's, against gradients in float64.

The kernels of all selected tests are compiled at the same time before the first one. Each is launched by
itself, on what float64 gives forward; what ``attention`` does with both passes comes last.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from gallery import GALLERY, causal
from mod_gradients import SCORES, dense_attention, dense_gradients, for_each_score, mask, random_case, tables
from moved import moved
from torch import Tensor

import flash_attention
from flash_attention.backends import cuda_backward, cuda_kernels
from flash_attention.backward_call import BackwardCall
from flash_attention.cached import attention_cached
from flash_attention.call import EVERYTHING, Mask, Scores, problem_of
from flash_attention.layouts import DENSE
from flash_attention.mods.tracing import trace
from flash_helpers import build
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import BACKWARD, AttentionProblem
from flash_helpers.select.candidates import kernel_for, unable_reason
from flash_helpers.select.chosen import Choice

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

BATCH, HEADS, HEADS_KV, SEQ_Q, SEQ_K, D = 2, 4, 2, 60, 100, 64
N_RANDOM = 200  # on each family
FAMILIES = ("ampere", "hopper")


class Case(NamedTuple):
    """Inputs, functions, and the same for float64 with all scores at once."""

    inputs: tuple[Tensor, ...]
    learnt: tuple[Tensor, ...]
    mods: dict[str, Any]
    wide: tuple[Tensor, ...]
    wide_mods: dict[str, Any]


def inputs(seq_q: int, seq_k: int, d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((seq_q, HEADS), (seq_k, HEADS_KV), (seq_k, HEADS_KV))
    return tuple(torch.randn(BATCH, n, h, d, generator=generator).to("cuda", dtype) for n, h in shapes)


def of_tables(
    name: str, masked: bool = False, sizes=(SEQ_Q, SEQ_K), d: int = D, dtype=torch.bfloat16
) -> Case:
    learnt = {n: t.cuda().requires_grad_() for n, t in tables().items()}
    wide = {n: t.detach().double().requires_grad_() for n, t in learnt.items()}
    with_mask = {"mask_mod": mask} if masked else {}
    return Case(
        inputs(*sizes, d, dtype),
        tuple(learnt.values()),
        {"score_mod": lambda s, b, h, q, k: SCORES[name](s, b, h, q, k, learnt), **with_mask},
        tuple(wide.values()),
        {"score_mod": lambda s, b, h, q, k: SCORES[name](s, b, h, q, k, wide), **with_mask},
    )


def of_gallery(name: str) -> Case:
    kind, function = GALLERY[name]
    made = moved(function, "cuda:0")
    key = f"{kind}_mod"
    wide = {key: for_each_score(made, kind == "score")}
    return Case(inputs(64, 64, D, torch.float16), (), {key: made}, (), wide)


def of_random(seed: int) -> Case:
    made = random_case(seed, torch.device("cuda", 0), D)
    return Case(made.inputs, made.learnt, made.mods, made.wide, made.wide_mods)


def of_long_mask(name: str, alone: bool = False) -> Case:
    """More than a few tiles, of which bits tell what a mask leaves; alone: it is the only function."""
    generator = torch.Generator().manual_seed(5)
    documents = torch.repeat_interleave(torch.arange(6), torch.tensor([10, 300, 70, 1, 400, 219]))
    document = documents.cuda()
    shuffled = documents[torch.randperm(1000, generator=generator)].cuda()
    of_head = torch.stack([document.roll(90 * h) for h in range(HEADS)])
    slopes = torch.linspace(0.1, 1, HEADS).cuda().requires_grad_()
    wide = slopes.detach().double().requires_grad_()
    masks = {
        "documents": lambda b, h, q, k: document[q] == document[k],
        "causal documents": lambda b, h, q, k: (document[q] == document[k]) & (q >= k),
        "documents in disorder": lambda b, h, q, k: shuffled[q] == shuffled[k],
        "documents of each head": lambda b, h, q, k: of_head[h, q] == of_head[h, k],
        "documents of each item": lambda b, h, q, k: document[torch.clamp(q - 40 * b, 0)] == document[k],
        "the first keys": lambda b, h, q, k: k < 100 + q * 0,
    }
    score = lambda slopes: lambda s, b, h, q, k: s + slopes[h] * (k - q) * 0.01  # noqa: E731
    if alone:
        mods = {"mask_mod": masks[name]}
        return Case(inputs(1000, 1000, D, torch.bfloat16), (), mods, (), mods)
    return Case(
        inputs(1000, 1000, D, torch.bfloat16),
        (slopes,),
        {"score_mod": score(slopes), "mask_mod": masks[name]},
        (wide,),
        {"score_mod": score(wide), "mask_mod": masks[name]},
    )


def of_added(name: str, d: int, sizes: tuple[int, int]) -> Case:
    """Functions that add to the score what is known before it, of which nothing is learnt."""
    generator = torch.Generator().manual_seed(6)
    seq_q, seq_k = sizes
    bias = torch.randn(HEADS, seq_q, seq_k + 2, generator=generator).to("cuda", torch.bfloat16)
    table = torch.randn(HEADS, 32, generator=generator).cuda()
    far = torch.randn(HEADS, seq_q + seq_k, generator=generator).cuda()
    even, odd, turned = bias[..., :seq_k], bias[..., 1 : seq_k + 1], bias[..., :seq_k].mT.contiguous().mT
    bucket = lambda q, k: torch.clamp((torch.log(torch.abs(q - k) + 1.0) * 6.3).long(), max=31)  # noqa: E731
    score = {
        "bias": lambda s, b, h, q, k: s + even[h, q, k],
        "bias of odd rows": lambda s, b, h, q, k: s + odd[h, q, k],
        "bias, transposed": lambda s, b, h, q, k: s + turned[h, q, k],
        "bias of one row": lambda s, b, h, q, k: s + even[:, :1].expand(-1, seq_q, -1)[h, q, k],
        "buckets": lambda s, b, h, q, k: s + table[h, bucket(q, k)],
        "bias and distance": lambda s, b, h, q, k: s + even[h, q, k] + torch.sin(far[h, q - k + seq_k]),
        "endless behind the end": lambda s, b, h, q, k: s + 1.0 / (seq_q - q) + k * 0.0,
    }[name]
    mods = {"score_mod": score}
    return Case(inputs(*sizes, d, torch.bfloat16), (), mods, (), mods)


ADDED = (
    "bias", "bias of odd rows", "bias, transposed", "bias of one row", "buckets", "bias and distance",
    "endless behind the end",
)  # fmt: skip
LONG = (
    "documents", "causal documents", "documents in disorder", "documents of each head",
    "documents of each item", "the first keys",
)  # fmt: skip
CASES: dict[str, Any] = {f"{name} of tables": functools.partial(of_tables, name) for name in SCORES}
CASES |= {f"{name} of tables, masked": functools.partial(of_tables, name, True) for name in SCORES}
CASES |= {f"{name} of the gallery": functools.partial(of_gallery, name) for name in GALLERY}
CASES |= {f"{name}, long": functools.partial(of_long_mask, name) for name in LONG}
CASES |= {f"{name}, long and alone": functools.partial(of_long_mask, name, True) for name in LONG}
CASES |= {
    f"{name} added, {d}, {sizes[0]}": functools.partial(of_added, name, d, sizes)
    for name in ADDED
    for d in (64, 128)
    for sizes in ((256, 384), (300, 260))
}
CASES |= {f"random {seed}": functools.partial(of_random, seed) for seed in range(N_RANDOM)}


def forward(case: Case, mask: Mask, softcap: float) -> tuple[Any, Tensor, Tensor]:
    """What is traced, and output and LSE, as the forward pass rounds them."""
    traced = trace(**case.mods, device="cuda:0")
    with torch.no_grad():
        wide = [x.double() for x in case.inputs]
        out, lse = dense_attention(wide, window=tuple(mask), softcap=softcap, **case.wide_mods)
    return traced, out.to(case.inputs[0].dtype), lse.float()


class Run:
    """A backward call of one case, by a kernel of one family."""

    def __init__(
        self, case: Case, mask: Mask = EVERYTHING, softcap: float = 0.0, deterministic: bool = False
    ):
        self.case, self.mask, self.softcap, self.deterministic = case, mask, softcap, deterministic

    def problem(self) -> AttentionProblem:
        traced = trace(**self.case.mods, device="cuda:0")
        scores = Scores(self.case.inputs[0].shape[-1] ** -0.5, self.softcap, None, traced)
        learnt = tuple(i for i, x in enumerate(traced.tensors) if x.requires_grad)
        forward = problem_of(*(x.detach() for x in self.case.inputs), self.mask, scores)
        return forward.backward(self.deterministic, learnt)

    def kernel(self, family: str) -> Kernel | None:
        problem, facts = self.problem(), cuda_kernels.device_facts_of(0)
        for direction in directions(BACKWARD):
            if direction.family.name == family and (found := direction.defaults(problem, facts)):
                config = found.whole[0]
                return None if unable_reason(config, problem, [config]) else kernel_for(config, problem)
        return None

    def gradients(self, kernel: Kernel) -> list[Tensor]:
        """Of q, k, v, and of what is learnt."""
        traced, out, lse = forward(self.case, self.mask, self.softcap)
        q, k, v = (x.detach() for x in self.case.inputs)
        self.given = losses(out, lse)
        made = [torch.full_like(x, math.nan) for x in (q, k, v)]
        captured = {i: torch.full(x.shape, math.nan, dtype=x.dtype, device=x.device)
                    for i, x in enumerate(traced.tensors) if x.requires_grad}  # fmt: skip
        call = BackwardCall(
            q, k, v, out, lse, *self.given, *made, None, self.mask,
            Scores(q.shape[-1] ** -0.5, self.softcap, None, traced), DENSE, self.deterministic, captured,
        )  # fmt: skip
        cuda_backward.run_backward(call, Choice(kernel, "a test"))
        torch.cuda.synchronize()
        by_tensor = {id(traced.tensors[i]): gradient for i, gradient in captured.items()}
        return made + [by_tensor.get(id(x), torch.zeros_like(x)) for x in self.case.learnt]

    def check(self, kernel: Kernel, tolerance: float) -> list[Tensor]:
        found = self.gradients(kernel)
        case = self.case
        expected = dense_gradients(
            case.inputs, self.given, case.wide, window=tuple(self.mask), softcap=self.softcap,
            **case.wide_mods,
        )  # fmt: skip
        for i, (x, exact) in enumerate(zip(found, expected, strict=True)):
            assert not x.isnan().any(), i
            floor = 1e-2 if i < 3 else 0.5  # a table's gradient is a sum of many
            assert (x.double() - exact).abs().max() <= tolerance * max(exact.abs().max().item(), floor), i
        return found


def losses(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    dlse = torch.randn(lse.shape, generator=generator).cuda().masked_fill(lse == -math.inf, 0.0)
    return torch.randn(out.shape, generator=generator).to(out), dlse


SIZES = {
    "plain": ((300, 260), (None, None), 0.0),
    "causal": ((260, 300), (None, 0), 0.0),
    "window, soft cap": ((200, 200), (70, 5), 2.0),
}
DETERMINISTIC = (
    "causal documents, long",
    "documents of each head, long",
    "dense bias of tables",
    "nonlinear of tables, masked",
    "bias added, 64, 256",
    "bias added, 64, 300",
    "buckets added, 64, 300",
    "bias added, 128, 256",
    "buckets added, 128, 300",
    "random 0",
    "random 3",
)
CELLS = [(name, "as chosen") for name in CASES] + [(name, "deterministic") for name in DETERMINISTIC]
CELLS += [(f"d {d}", way) for d in (40, 96, 128, 192, 256) for way in SIZES]


CELLS += [(f"{name} added, {d}, 300", "causal") for name in ("bias", "buckets") for d in (64, 128)]


@functools.cache
def run_of(name: str, way: str) -> Run:
    if way == "causal" and "added" in name:  # longer, so that the kernels that add up dQ are chosen
        kind, d, _ = name.split(", ")
        return Run(of_added(kind.removesuffix(" added"), int(d), (1100, 1200)), Mask(None, 0))
    if way in SIZES:
        sizes, window, softcap = SIZES[way]
        return Run(of_tables("nonlinear", True, sizes, int(name[2:])), Mask(*window), softcap)
    return Run(CASES[name](), deterministic=way == "deterministic")


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> dict[tuple[str, str, str], Kernel]:
    """Of each case, way and family of the selected tests the kernel, compiled."""
    found: dict[tuple[str, str, str], Kernel] = {}
    for item in request.session.items:
        cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")
        if cell:
            family = item.callspec.params["family"]
            if kernel := run_of(*cell).kernel(family):
                found[(*cell, family)] = kernel
    build.build_kernels(list(dict.fromkeys(found.values())), [cuda_kernels.device_facts_of(0).target])
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(cell).replace(" ", "_"))
def test_gradients(kernels, cell: tuple[str, str], family: str) -> None:
    if (*cell, family) not in kernels:
        pytest.skip(f"kernels of the {family} family take no mods on this device")
    run, kernel = run_of(*cell), kernels[(*cell, family)]
    first = run.check(kernel, 2.5e-2)
    again = run.gradients(kernel)
    same = range(len(first)) if run.deterministic else range(3, len(first))
    assert all(torch.equal(first[i], again[i]) for i in same)


# ---------------------------------------------------------------------- both passes
def learnt_tables() -> dict[str, Tensor]:
    return {n: t.cuda().requires_grad_() for n, t in tables().items()}


def test_attention_and_its_gradients() -> None:
    case = of_tables("nonlinear", True)
    own = [x.requires_grad_() for x in case.inputs]
    results = flash_attention.attention(*own, return_lse=True, **case.mods)
    given = losses(*results)
    learnt = [t for t in case.learnt if t.shape == (5,)]
    found = torch.autograd.grad(results, (*own, *learnt), given)
    wide = [t for t in case.wide if t.shape == (5,)]
    for x, exact in zip(found, dense_gradients(own, given, wide, **case.wide_mods), strict=True):
        assert (x.double() - exact).abs().max() <= 2.5e-2 * exact.abs().max()


@pytest.mark.parametrize("softmax_scale", [0.0, -0.3])
def test_what_a_mask_hides_stays_hidden_at_every_scale(softmax_scale: float) -> None:
    """Gradients are off by at most twice what the CPU's are, or by two roundings of the largest."""
    document = torch.arange(700) // 130
    drawn = inputs(700, 700, D, torch.bfloat16)
    found = {}
    for device in ("cuda", "cpu"):
        there = document.to(device)
        leaves = [x.to(device).requires_grad_() for x in drawn]
        out = flash_attention.attention(
            *leaves, softmax_scale=softmax_scale, mask_mod=lambda b, h, q, k, d=there: d[q] == d[k]
        )
        found[device] = torch.autograd.grad(out, leaves, torch.ones_like(out))
    wide = [x.double().cpu().requires_grad_() for x in drawn]
    q, k, v = (x.transpose(1, 2) for x in wide)
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, dim=1) for x in (k, v))
    hidden = document[:, None] != document[None]
    scores = (softmax_scale * q @ k.mT).masked_fill(hidden, -math.inf)
    exact = torch.autograd.grad((scores.softmax(-1) @ v).sum(), wide)
    for own, other, right in zip(found["cuda"], found["cpu"], exact, strict=True):
        allowed = 2 * max((other.double() - right).abs().max(), right.abs().max() * 2.0**-9)
        assert (own.double().cpu() - right).abs().max() <= allowed


@pytest.mark.parametrize("layout", ["packed", "cached"])
def test_other_layouts_have_the_gradients_of_the_cpu(layout: str) -> None:
    generator = torch.Generator().manual_seed(9)
    make = lambda *shape: torch.randn(*shape, D, generator=generator).bfloat16()  # noqa: E731
    grads = []
    lengths = [(5, 40), (0, 3), (60, 60), (17, 1)]
    ends = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in zip(*lengths, strict=True)]
    used = torch.tensor([100, 33], dtype=torch.int32)
    shapes = ((84, 4), (107, 2), (107, 2)) if layout == "packed" else ((2, 9, 4), (2, 100, 2), (2, 100, 2))
    tensors = [make(*shape) for shape in shapes]
    for device in ("cpu", "cuda"):
        own = [x.to(device).requires_grad_() for x in tensors]
        learnt = {n: t.to(device).requires_grad_() for n, t in tables().items()}

        def scored(s, b, h, q, k, learnt=learnt):
            return SCORES["nonlinear"](s, b, h, q, k, learnt) + learnt["slopes"][(b + h) % 4] * k * 0.01

        mods = {"score_mod": scored, "mask_mod": mask, "return_lse": True}
        if layout == "packed":
            results = flash_attention.attention_varlen(*own, *(x.to(device) for x in ends), 60, 60, **mods)
        else:
            results = attention_cached(*own, used.to(device), **mods)
        given = [x.to(device) for x in losses(*(x.cuda() for x in results))]
        wanted = (*own, learnt["few"], learnt["slopes"])
        grads.append(torch.autograd.grad(results, wanted, given))
    for ours, on_cpu in zip(grads[1], grads[0], strict=True):
        scale = max(on_cpu.abs().max().item(), 1e-2)
        assert (ours.cpu() - on_cpu).abs().max() <= 2.5e-2 * scale


def test_a_term_that_is_not_finite_makes_its_own_element_nan() -> None:
    table = torch.tensor([0.0, 1.0, 4.0], device="cuda").requires_grad_()
    q, k, v = inputs(40, 40, D, torch.float16)
    out = flash_attention.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + torch.sqrt(table[j % 3]))
    (grad,) = torch.autograd.grad(out.float().square().sum(), table)
    assert grad.isnan().tolist() == [True, False, False]


def test_against_flex_attention_in_float64() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = inputs(64, 64, D, torch.float16)
    table = torch.randn(HEADS, 128, generator=torch.Generator().manual_seed(1)).cuda()
    grads = []
    for wide in (False, True):
        own = [x.double().requires_grad_() if wide else x.clone().requires_grad_() for x in (q, k, v)]
        learnt = (table.double() if wide else table.clone()).requires_grad_()
        score_mod = lambda s, b, h, i, j, t=learnt: s * 0.7 + t[h, i - j + 64]  # noqa: E731
        if wide:
            block_mask = flex.create_block_mask(causal, None, None, 64, 64, device="cuda")
            out = flex.flex_attention(
                *(x.transpose(1, 2) for x in own), score_mod=score_mod, block_mask=block_mask, enable_gqa=True
            ).transpose(1, 2)
        else:
            out = flash_attention.attention(*own, score_mod=score_mod, mask_mod=causal)
        loss = (out.double() * losses(out, out[..., 0])[0].double()).sum()
        grads.append(torch.autograd.grad(loss, (*own, learnt)))
    for ours, exact in zip(*grads, strict=True):
        assert (ours.double() - exact).abs().max() <= 1e-2 * exact.abs().max()
