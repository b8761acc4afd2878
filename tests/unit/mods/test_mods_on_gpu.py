"""Kernels of each family with functions of the user's, against what the CPU computes.

The kernels of the selected tests are compiled at the same time before the first of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gallery import BATCH, GALLERY, HEADS, SEQ
from moved import moved
from random_functions import HEADS as RANDOM_HEADS
from random_functions import function, tables

import flash_attention
from flash_attention.backends import cuda_kernels, cuda_tiles
from flash_attention.cached import attention_cached
from flash_attention.call import EVERYTHING, Scores
from flash_attention.call import problem_of as asked
from flash_attention.layouts import DENSE
from flash_attention.mods.tracing import trace
from flash_attention.run.plain_forms import mask_and_scores
from flash_helpers import build
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import directions
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import FORWARD, AttentionProblem
from flash_helpers.select.candidates import kernel_for, unable_reason
from flash_helpers.test.reference import reference

pytestmark = pytest.mark.gpu

D = 64
N_RANDOM = 200  # on each family
KINDS = {"score": "score_mod", "mask": "mask_mod"}
FAMILIES = ("ampere", "hopper")


def gallery_case(name: str) -> dict[str, Callable[..., Any]]:
    kind, made = GALLERY[name]
    return {KINDS[kind]: made}


@functools.cache
def random_case(seed: int) -> dict[str, Callable[..., Any]]:
    captured = tables(torch.Generator().manual_seed(seed))
    kind = "mask" if seed % 2 else "score"
    made = function(seed, kind, captured, depth=3, smooth=True).function
    return {KINDS[kind]: bounded(made) if kind == "score" else made}


def bounded(score: Callable[..., Any]) -> Callable[..., Any]:
    """A score of moderate size: of a large one the last bits, which differ, decide about the softmax."""
    return lambda s, b, h, q, k: s + 3.0 * torch.tanh(0.1 * score(s, b, h, q, k))


CASES = {name: functools.partial(gallery_case, name) for name in GALLERY} | {
    f"random {seed}": functools.partial(random_case, seed) for seed in range(N_RANDOM)
}


def on_gpu(mods: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {name: moved(made, "cuda:0") for name, made in mods.items()}


def inputs(seq: int, heads: int, d: int = D) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    make = lambda h: torch.randn(BATCH, seq, h, d, generator=generator).half()  # noqa: E731
    return [make(heads), make(2 if heads % 2 == 0 else 1), make(2 if heads % 2 == 0 else 1)]


def config_of(family: str, problem: AttentionProblem) -> Any | None:
    """What a family runs such a problem with here; None: it takes no mods, or does not run here."""
    facts = cuda_kernels.device_facts_of(0)
    for direction in directions(FORWARD):
        if direction.family.name == family and (found := direction.defaults(problem, facts)):
            config = found.whole[0]
            return None if unable_reason(config, problem, [config]) else config
    return None


def problem_of(mods: dict[str, Callable[..., Any]], heads: int, d: int = D) -> AttentionProblem:
    """What a call with these functions asks for: where one says what an option says, the option's kernel."""
    traced = trace(**on_gpu(mods), device="cuda:0")
    said = mask_and_scores(EVERYTHING, Scores(d**-0.5, 0.0, None, traced), DENSE, SEQ, SEQ)
    return asked(*inputs(SEQ, heads, d), *said, lse=True)


def heads_of(name: str) -> int:
    return RANDOM_HEADS if name.startswith("random") else HEADS


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> dict[tuple[str, str], Kernel]:
    """Of each case and family of the selected tests the kernel, compiled."""
    found: dict[tuple[str, str], Kernel] = {}
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        name, family = given.get("name"), given.get("family")
        if name in CASES:
            problem = problem_of(CASES[name](), heads_of(name))
            if config := config_of(family, problem):
                found[name, family] = kernel_for(config, problem)
    target = cuda_kernels.device_facts_of(0).target
    build.build_kernels(list(dict.fromkeys(found.values())), [target])
    return found


def close(found, expected, tolerance: float) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.cpu().double(), y.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
def test_the_gpu_computes_what_the_cpu_computes(kernels, name: str, family: str) -> None:
    if (name, family) not in kernels:
        pytest.skip(f"kernels of the {family} family take no mods on this device")
    kernel, mods, heads = kernels[name, family], CASES[name](), heads_of(name)
    # One tile; then many, with places outside of the captured tensors, which read as 0.
    for seq in (SEQ, 330):
        q, k, v = inputs(seq, heads)
        on_device = flash_attention.attention(
            q.cuda(), k.cuda(), v.cuda(), config=kernel.config, return_lse=True, **on_gpu(mods)
        )
        assert flash_attention.last_kernel() == kernel
        close(on_device, flash_attention.attention(q, k, v, return_lse=True, **mods), 4e-3)


def distance_and_table(x: float, table: torch.Tensor) -> dict[str, Callable[..., Any]]:
    return {"score_mod": lambda s, b, h, q, k: s - x * torch.abs(q - k) + table[k]}


def test_numbers_lengths_and_contents_compile_nothing(kernels, monkeypatch) -> None:
    q, k, v = inputs(SEQ, HEADS)
    on_device = [x.cuda() for x in (q, k, v)]
    flash_attention.attention(*on_device, **distance_and_table(0.5, torch.zeros(9, device="cuda")))
    monkeypatch.setattr(build, "build_kernels", None)
    for i in range(100):
        table, n = torch.full((i % 7 + 1,), 0.1 * i), 1 + 3 * i % SEQ
        mods = distance_and_table(0.01 * i, table.cuda())
        found = flash_attention.attention(*(x[:, :n] for x in on_device), return_lse=True, **mods)
        if i % 10 == 0:
            mods = distance_and_table(0.01 * i, table)
            expected = flash_attention.attention(*(x[:, :n] for x in (q, k, v)), return_lse=True, **mods)
            close(found, expected, 4e-3)


MASKED = {
    "score_mod": lambda s, b, h, q, k: s * (1.0 + 0.1 * h) - 0.05 * b * (k % 7),
    "mask_mod": lambda b, h, q, k: (q + k + b + h) % 3 != 0,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (30, 5)},
        {"window": (None, -3)},
        {"softcap": 1.5},
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
        {"sinks": torch.linspace(-1, 1, HEADS)},
        {"out_dtype": torch.float32},
    ],
    ids=str,
)
def test_beside_other_options(family: str, options: dict[str, Any]) -> None:
    config = config_of(family, problem_of(MASKED, HEADS))
    if config is None:
        pytest.skip(f"kernels of the {family} family take no mods on this device")
    q, k, v = inputs(150, HEADS)
    there = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    found = flash_attention.attention(
        q[:, :100].cuda(), k.cuda(), v.cuda(), return_lse=True, config=config, **there, **MASKED
    )
    options = {name: x for name, x in options.items() if name != "out_dtype"}
    close(found, reference(q[:, :100], k, v, **options, **MASKED), 4e-3)


@pytest.mark.parametrize("seq_q", [1, 5, 70])
@pytest.mark.parametrize("d", [40, 64, 128, 200])
def test_what_the_library_chooses(seq_q: int, d: int) -> None:
    """Few queries over many keys are split, heads are padded."""
    q, k, v = inputs(2100, HEADS, d)
    found = flash_attention.attention(
        q[:, :seq_q].cuda(), k.cuda(), v.cuda(), return_lse=True, causal=True, **MASKED
    )
    close(found, flash_attention.attention(q[:, :seq_q], k, v, return_lse=True, causal=True, **MASKED), 4e-3)


def test_packed_sequences_and_caches_count_their_own_places() -> None:
    lengths = [(5, 40), (0, 3), (60, 60), (17, 1)]
    ends = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0).int() for n in zip(*lengths, strict=True)]
    q, k, v = (x[0] for x in inputs(150, HEADS))
    packed = [q[: ends[0][-1]], k[: ends[1][-1]], v[: ends[1][-1]]]
    on_device = [x.cuda() for x in (*packed, *ends)]
    found = flash_attention.attention_varlen(*on_device, 60, 60, return_lse=True, **MASKED)
    close(found, flash_attention.attention_varlen(*packed, *ends, 60, 60, return_lse=True, **MASKED), 4e-3)

    q, _, _ = inputs(7, HEADS)
    pages, values = (
        torch.randn(9, 32, 2, D, generator=torch.Generator().manual_seed(i)).half() for i in (1, 2)
    )
    used, table = torch.tensor([120, 20], dtype=torch.int32), torch.tensor([[8, 2, 5, 1], [3, 0, 7, 4]]).int()
    for there in ({}, {"block_table": table}):
        keys = [pages, values] if there else [x[:8].view(2, 128, 2, D) for x in (pages, values)]
        call = [q, *keys, used]
        found = attention_cached(
            *(x.cuda() for x in call), return_lse=True, **{n: x.cuda() for n, x in there.items()}, **MASKED
        )
        close(found, attention_cached(*call, return_lse=True, **there, **MASKED), 4e-3)


def document_mask(document: torch.Tensor) -> dict[str, Callable[..., Any]]:
    return {"mask_mod": lambda b, h, q, k: (document[q] == document[k]) & (q >= k)}


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_follow_what_the_mask_reads(family: str) -> None:
    """Bits of tiles are found once, and anew where a tensor is written to or is another one."""
    seq = 2500
    document = torch.arange(seq) // 700
    config = config_of(family, problem_of(document_mask(document), HEADS))
    q, k, v = inputs(seq, HEADS)
    on_device, there = [x.cuda() for x in (q, k, v)], document.cuda()
    mods = document_mask(there)

    def check() -> None:
        found = flash_attention.attention(*on_device, config=config, return_lse=True, **mods)
        expected = flash_attention.attention(q, k, v, return_lse=True, **document_mask(there.cpu()))
        close(found, expected, 4e-3)

    check()
    kept = len(cuda_tiles._kept)
    check()
    assert len(cuda_tiles._kept) == kept > 0
    there.copy_(torch.arange(seq) // 300)
    check()
    there[1000:1200] = 77
    check()
    mods = document_mask(there := (torch.arange(seq) // 1100).cuda())
    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles_of_items_and_heads(family: str) -> None:
    seq = 1500
    chosen = torch.rand(BATCH, HEADS, 12, 12, generator=torch.Generator().manual_seed(5)) > 0.7

    def mask(chosen: torch.Tensor) -> dict[str, Callable[..., Any]]:
        return {"mask_mod": lambda b, h, q, k: chosen[b, h, q // 128, k // 128]}

    q, k, v = inputs(seq, HEADS)
    config = config_of(family, problem_of(mask(chosen), HEADS))
    found = flash_attention.attention(
        q.cuda(), k.cuda(), v.cuda(), config=config, return_lse=True, **mask(chosen.cuda())
    )
    close(found, flash_attention.attention(q, k, v, return_lse=True, **mask(chosen)), 4e-3)
    nothing = torch.zeros_like(chosen)
    out, lse = flash_attention.attention(
        q.cuda(), k.cuda(), v.cuda(), config=config, return_lse=True, **mask(nothing.cuda())
    )
    assert not out.any()
    assert lse.isneginf().all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("seq", [700, 1024])
def test_warpgroups_that_see_nothing_of_a_tile(family: str, d: int, seq: int) -> None:
    """Before, behind and between the tiles of which they see something, full ones among these."""
    document = torch.arange(seq) // 130
    masks = {
        "the same": lambda there: lambda b, h, q, k: there[q] == there[k],
        "earlier": lambda there: lambda b, h, q, k: there[k] < there[q],
        "every third": lambda there: lambda b, h, q, k: (there[q] + there[k]) % 3 == 0,
    }
    q, k, v = inputs(seq, HEADS, d)
    for mask in masks.values():
        config = config_of(family, problem_of({"mask_mod": mask(document)}, HEADS, d))
        if config is None:
            pytest.skip(f"kernels of the {family} family take no mods on this device")
        mods = {"mask_mod": mask(document.cuda())}
        found = flash_attention.attention(
            q.cuda(), k.cuda(), v.cuda(), config=config, return_lse=True, **mods
        )
        expected = flash_attention.attention(q, k, v, return_lse=True, mask_mod=mask(document))
        close(found, expected, 4e-3)


def test_a_graph_finds_its_tiles_again() -> None:
    seq = 2000
    q, k, v = (x.cuda() for x in inputs(seq, HEADS))
    there = (torch.arange(seq) // 500).cuda()
    mods = document_mask(there)
    flash_attention.attention(q, k, v, **mods)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = flash_attention.attention(q, k, v, **mods)
    there.copy_(torch.arange(seq) // 900)
    graph.replay()
    expected = flash_attention.attention(q.cpu(), k.cpu(), v.cpu(), **document_mask(there.cpu()))
    close([found], [expected], 4e-3)


def with_bias(bias: torch.Tensor) -> dict[str, Callable[..., Any]]:
    return {"score_mod": lambda s, b, h, q, k: s + bias[h, q, k]}


def rows_apart(bias: torch.Tensor) -> torch.Tensor:
    """The same numbers, in rows of an odd stride that begin at odd places."""
    wide = torch.empty(*bias.shape[:-1], bias.shape[-1] + 4 + bias.shape[-1] % 2, dtype=bias.dtype)
    wide[..., 1 : bias.shape[-1] + 1] = bias
    return wide[..., 1 : bias.shape[-1] + 1]


LAID_OUT = {
    "contiguous": lambda bias: bias,
    "odd rows": rows_apart,
    "transposed": lambda bias: bias.mT.contiguous().mT,
    "every other key": lambda bias: bias.repeat_interleave(2, -1)[..., ::2],
    "one row": lambda bias: bias[:, :1].expand_as(bias),
    "one key": lambda bias: bias[..., :1].expand_as(bias),
    "smaller": lambda bias: bias[:, :-7, :-13],
}


def check_bias(family: str, bias: torch.Tensor, d: int, dtype: torch.dtype = torch.float16) -> None:
    heads, seq = bias.shape[0], 384
    problem = AttentionProblem(
        DType.BF16 if dtype is torch.bfloat16 else DType.FP16, BATCH, seq, seq, heads, 2, d, d,
        mod=trace(**with_bias(bias.cuda()), device="cuda:0").mod, lse=True,
    )  # fmt: skip
    config = config_of(family, problem)
    if config is None:
        pytest.skip(f"kernels of the {family} family take no mods on this device")
    q, k, v = (x.to(dtype) for x in inputs(seq, heads, d))
    options: dict[str, Any] = {"return_lse": True}
    found = flash_attention.attention(
        q.cuda(), k.cuda(), v.cuda(), config=config, **options, **with_bias(bias.cuda())
    )
    close(found, flash_attention.attention(q, k, v, **options, **with_bias(bias)), 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("layout", LAID_OUT)
def test_rows_of_a_bias_may_lie_anyhow(layout: str, d: int, family: str) -> None:
    bias = torch.randn(4, 384, 384, generator=torch.Generator().manual_seed(8)).bfloat16()
    check_bias(family, LAID_OUT[layout](bias), d)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [-1e4, -1e9, -1e12, -1e30, -3.3e38, -math.inf])
def test_tiles_of_finite_values_that_hide(value: float, family: str) -> None:
    """Tiles are taken from the last to the first: of the first one of a row nothing may be left."""
    bias = torch.randn(4, 384, 384, generator=torch.Generator().manual_seed(9))
    bias[:, ::3, -256:] = value
    bias[:, 1::3, :256] = value
    for dtype in (torch.float16, torch.bfloat16):
        check_bias(family, bias.bfloat16(), 128, dtype)
