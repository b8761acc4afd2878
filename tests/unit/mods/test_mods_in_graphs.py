"""``score_mod`` and ``mask_mod`` under ``torch.compile``, export and whoever else records operators."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gallery import GALLERY, causal
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flash_attention import attention, attention_varlen, sdpa
from flash_attention.cached import attention_cached
from flash_attention.errors import ModError
from flash_attention.flex_attention import flex_attention
from flash_attention.mods import and_masks, random, trace

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, HEADS, D_HEAD = 2, 4, 64
SLOPES = torch.tensor([0.5, 0.25, -0.125, 0.0], requires_grad=True)
DOCUMENT = torch.arange(128) // 16


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(seq_len: int, requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    shape = (BATCH, seq_len, HEADS, D_HEAD)
    q, k, v = (torch.randn(shape, generator=generator).half().requires_grad_(requires_grad) for _ in range(3))
    return q, k, v


def learnt(table: Tensor, left: int, factor: float) -> Callable[..., Any]:
    """Captures tensors that get gradients and others, a whole and a real number."""

    def score_mod(score, b, h, q, k):
        biased = score + SLOPES[h] * (k - q)
        biased = torch.where((q - k).abs() <= left, biased, -float("inf"))
        biased = torch.where(DOCUMENT[q] == DOCUMENT[k], biased, factor * biased)
        return torch.clamp(biased, min=-3.0) + table[b, h] + torch.dot(table[b], table[b]) + q // 3 % 5

    return score_mod


def same_document(b, h, q, k):
    return DOCUMENT[q] == DOCUMENT[k]


def call(q: Tensor, k: Tensor, v: Tensor, score_mod: Any = None, mask_mod: Any = None) -> Tensor:
    return attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)


def with_gradients(function: Any, inputs: Sequence[Tensor], *mods: Any, others: Sequence[Tensor] = ()) -> Any:
    out = function(*inputs, *mods)
    return out, *torch.autograd.grad(out.float().square().sum(), (*inputs, *others))


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


# ---------------------------------------------------------------------- torch.compile
def test_one_graph_for_all_lengths_numbers_and_contents() -> None:
    """Forward and backward, with gradients of captured tensors, as the same call gives them at once."""
    counter = CompileCounter()
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    mask = and_masks(causal, same_document)
    graphs = []
    cases = ((40, 5, 0.5), (61, 6, 0.25), (33, 7, 2.0))
    for i, (seq_len, left, factor) in enumerate(cases):
        table = torch.full((BATCH, HEADS), 0.25 * i, requires_grad=True)
        mods = learnt(table, left, factor), mask
        given = qkv(seq_len)
        found = with_gradients(compiled, given, *mods, others=(SLOPES, table))
        same(found, with_gradients(call, given, *mods, others=(SLOPES, table)))
        graphs.append(counter.frame_count)
    assert graphs == [1, 2, 2]  # the second holds lengths and numbers open


class Learnt(torch.nn.Module):
    """A bias that a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(HEADS, 99, generator=generator) / 4)
        self.layer = torch.nn.Linear(HEADS, HEADS)
        torch.nn.init.uniform_(self.layer.weight, -0.5, 0.5, generator=generator)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = self.layer(self.table.T).T

        def score_mod(score, b, h, q_idx, kv_idx):
            return score + bias[h, q_idx - kv_idx + 49]

        return attention(q, k, v, score_mod=score_mod, mask_mod=lambda b, h, i, j: i >= j)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.compile)])
def test_a_module_whose_functions_are_made_in_the_graph(backend: str) -> None:
    """Equal bits but for the layer's own bias: its gradient sums 99 distances in the compiler's order."""
    module, given = Learnt(), qkv(50)
    parameters = tuple(module.parameters())
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    found = with_gradients(compiled, given, others=parameters)
    expected = with_gradients(module, given, others=parameters)
    same(found[:-1], expected[:-1])
    n_distances, table_gradient = module.table.shape[1], expected[4]
    of_rounding = n_distances * 2**-24 * float(table_gradient.abs().max())
    torch.testing.assert_close(found[-1], expected[-1], rtol=0, atol=of_rounding)


@pytest.mark.compile
@pytest.mark.parametrize("name", GALLERY)
def test_the_gallery(name: str) -> None:
    kind, function = GALLERY[name]
    mods = (function, None) if kind == "score" else (None, function)
    given = qkv(64, requires_grad=False)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    if name == "images and text":
        with pytest.raises(Exception, match=r"a row is unpacked .* Index it, e\.g\. row\[0\] and row\[1\]"):
            compiled(*given, *mods)
        return
    torch.testing.assert_close(compiled(*given, *mods), call(*given, *mods), rtol=1e-3, atol=1e-3)


def test_a_row_is_indexed() -> None:
    """The mask above, written so."""
    intervals, image = torch.arange(128).reshape(64, 2) % 40, torch.arange(64) // 5

    def mask(b, h, q, k):
        interval = intervals[image[k]]
        return (q >= interval[0]) & (q < interval[1])

    given = qkv(64, requires_grad=False)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, None, mask), call(*given, None, mask))


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(50, 50).tril().bool(),
        torch.linspace(-1, 1, 50 * 50).reshape(1, 1, 50, 50).repeat(BATCH, HEADS, 1, 1),
        torch.linspace(-1, 1, HEADS * 50, dtype=torch.float16).reshape(1, HEADS, 1, 50),
    ],
    ids=["bools", "every head", "keys alone"],
)
def test_dense_masks_of_sdpa(mask: Tensor) -> None:
    given = [x.transpose(1, 2) for x in qkv(50)]
    mask = mask.requires_grad_() if mask.is_floating_point() else mask
    learnt = (mask,) if mask.is_floating_point() else ()
    compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
    found = with_gradients(compiled, given, mask, others=learnt)
    same(found, with_gradients(sdpa, given, mask, others=learnt))


@pytest.mark.parametrize("in_all_blocks", [True, False])
def test_a_block_mask(in_all_blocks: bool) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    document = torch.arange(256) // 70
    block_mask = flex.create_block_mask(
        lambda b, h, q, k: (document[q] == document[k]) & (q >= k), None, None, 256, 256, device="cpu"
    )
    if not in_all_blocks:  # the second row of blocks sees nothing
        block_mask.kv_num_blocks[..., 1] = 0
    given = [x.transpose(1, 2) for x in qkv(256, requires_grad=False)]
    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    found = compiled(*given, block_mask=block_mask)
    assert torch.equal(found, flex_attention(*given, block_mask=block_mask))
    assert in_all_blocks or not found[:, :, 128:].any()


def test_a_captured_tensor_may_be_the_first_argument() -> None:
    limit = torch.tensor(3.0)

    def score_mod(score, b, h, q, k):
        most = torch.clamp(limit, score, limit * 2)
        return torch.fmod(limit, k + 2) + torch.add(most, 1.5, alpha=0.5) + torch.mul(limit, score)

    inputs = qkv(64)
    same(
        with_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs, score_mod),
        with_gradients(call, inputs, score_mod),
    )


def alibi(score, b, h, q, k):
    return score + SLOPES[h] * (k - q)


def test_no_gradient_within_a_function_is_refused() -> None:
    def score_mod(score, b, h, q, k):
        with torch.no_grad():
            factor = score.abs()
        return score * factor

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"under torch\.no_grad\. A function is differentiated as a whole"):
        compiled(*qkv(64), score_mod)
    with torch.no_grad():
        assert torch.equal(compiled(*qkv(64), score_mod), call(*qkv(64), score_mod))
    with pytest.raises(ModError, match=r"under torch\.no_grad"):  # what was recorded before is not taken
        call(*qkv(64), score_mod)


def test_what_a_value_says_of_itself() -> None:
    table = torch.randn(64, 3)

    def score_mod(score, b, h, q, k):
        row = table[q]
        assert score.is_floating_point()
        assert not q.is_floating_point()
        return score * len(row) + row.size(-1) * row.numel() * row.dim() * score[None].sum()

    inputs = qkv(64)
    same(
        with_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs, score_mod),
        with_gradients(call, inputs, score_mod),
    )
    assert str(trace(score_mod).mod) == str(trace(lambda s, b, h, q, k: s * 3 + 9 * s[None].sum()).mod)


def test_a_method_takes_its_own_order_of_arguments() -> None:
    def score_mod(score, b, h, q, k):
        return score.where(q > k, (k > 2).where(h == 0, False) * 1.5)

    inputs = qkv(64)
    same(
        with_gradients(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs, score_mod),
        with_gradients(call, inputs, score_mod),
    )


def test_other_layouts() -> None:
    q, k, v = qkv(50, requires_grad=False)
    offsets, used = torch.tensor([0, 20, 50]).int(), torch.tensor([20, 50]).int()
    packed = (q[0], k[0], v[0], offsets, offsets, 30, 30)
    calls = [(attention_varlen, packed), (attention_cached, (q[:, :1], k, v, used))]
    for function, given in calls:
        compiled = torch.compile(
            functools.partial(function, score_mod=alibi, causal=True), fullgraph=True, backend="aot_eager"
        )
        assert torch.equal(compiled(*given), function(*given, score_mod=alibi, causal=True))


def test_an_output_that_is_given() -> None:
    given, out = qkv(50, requires_grad=False), torch.empty(BATCH, 50, HEADS, D_HEAD, dtype=torch.float16)
    compiled = torch.compile(
        lambda q, k, v, out: attention(q, k, v, mask_mod=causal, out=out) + 1,
        fullgraph=True,
        backend="aot_eager",
    )
    found = compiled(*given, out)
    assert torch.equal(out, call(*given, None, causal))
    assert torch.equal(found, out + 1)


def test_random_numbers() -> None:
    given = qkv(50, requires_grad=False)
    mask = lambda b, h, q, k: random(7, b, h, q, k) < 0.5  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, None, mask), call(*given, None, mask))


# ---------------------------------------------------------------------- refusals
def branches(score, b, h, q, k):
    return score if q > k else score + 1


def has_no_rule(score, b, h, q, k):
    return torch.lgamma(score)


REFUSED = {
    "a branch": (branches, "Data-dependent branching", "q > k"),
    "a function without a rule": (has_no_rule, "the function lgamma has no rule", "lgamma"),
    "a bool": (lambda s, b, h, q, k: q > k, "returns a bool; it must return a number, the new score", ""),
    "no function": (3, "score_mod is 3; it must be a function score_mod", ""),
    "a tensor": (torch.ones(16, 16), r"score_mod is a tensor of shape \(16, 16\).*dense_bias", ""),
    "a whole tensor": (lambda s, b, h, q, k: s + DOCUMENT.reshape(8, 16), "a whole tensor of shape", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded_is_refused(name: str) -> None:
    """With the user's line, where there is one."""
    function, text, line = REFUSED[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=text) as raised:
        compiled(*qkv(16), function)
    assert line in str(raised.value)


def test_a_branch_is_never_taken_where_graphs_may_break() -> None:
    """Outside of a graph the function meets tensors without values."""
    compiled = torch.compile(call, backend="aot_eager")
    with pytest.raises(ModError, match=r"(?s)value that differs from score to score.*torch\.where"):
        compiled(*qkv(16), branches)


def test_a_captured_tensor_of_another_type_is_refused() -> None:
    """That of a graph's caller, which the recording has not seen."""
    made = make_fx(lambda q, k, v, slopes: attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h]))
    given = qkv(16, requires_grad=False)
    graph = made(*given, torch.zeros(HEADS))
    with pytest.raises(ModError, match=r"number 0 is torch.int64 of 1 dimensions; .* float32 of 1"):
        graph(*given, torch.zeros(HEADS, dtype=torch.int64))


# ---------------------------------------------------------------------- who else records
class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 2.0, 0.0]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score_mod = lambda s, b, h, i, j: s * 2 + self.slopes[h] * (j - i)  # noqa: E731
        return attention(q, k, v, score_mod=score_mod, mask_mod=lambda b, h, i, j: i >= j)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs(strict: bool) -> None:
    module, given = Scaled(), qkv(50, requires_grad=False)
    lengths = ({1: torch.export.Dim("seq_len")},) * 3
    program = torch.export.export(module, given, strict=strict, dynamic_shapes=lengths)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for seq_len in (50, 33):
        given = qkv(seq_len, requires_grad=False)
        assert torch.equal(again(*given), module(*given))


def test_fake_tensors() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = call(*(mode.from_tensor(x) for x in qkv(16)), learnt(torch.zeros(BATCH, HEADS), 3, 0.5))
    assert out.shape == (BATCH, 16, HEADS, D_HEAD)


def test_autocast() -> None:
    given = qkv(16, requires_grad=False)
    mask = torch.ones(16, 16).tril().bool()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(*(x.float() for x in given), alibi)
        of_mask = sdpa(*(x.float().transpose(1, 2) for x in given), attn_mask=mask)
    bfloat16 = tuple(x.bfloat16() for x in given)
    assert torch.equal(out, call(*bfloat16, alibi))
    assert torch.equal(of_mask, sdpa(*(x.transpose(1, 2) for x in bfloat16), attn_mask=mask))


def test_functional_gradients() -> None:
    q, k, v = qkv(16, requires_grad=False)

    def loss(q: Tensor, slopes: Tensor) -> Tensor:
        out = attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 2 + slopes[h] * (i - j))
        return out.float().square().sum()  # type: ignore[no-any-return]

    slopes = SLOPES.detach()
    found = torch.func.grad(loss, argnums=(0, 1))(q, slopes)
    leaves = q.clone().requires_grad_(), slopes.clone().requires_grad_()
    same(found, torch.autograd.grad(loss(*leaves), leaves))


@pytest.mark.parametrize("name", ["made", "detached", "of no dimension", "a mask", "views of one bias"])
def test_functional_gradients_with_captured_tensors_that_want_none(name: str) -> None:
    q, k, v = qkv(16, requires_grad=False)
    bias = torch.randn(1, 1, 16, 16)

    def loss(q: Tensor) -> Tensor:
        if name == "a mask" or name == "views of one bias":
            mask = torch.ones(16, 16, dtype=torch.bool).tril() if name == "a mask" else bias
            return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).float().square().sum()
        slopes = SLOPES.detach() * 2 if name == "made" else q.float().sum((0, 1, 3)).detach()
        slopes = slopes.sum() if name == "of no dimension" else slopes
        out = attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + (slopes[h] if slopes.ndim else slopes) * i
        )
        return out.float().square().sum()  # type: ignore[no-any-return]

    leaf = q.clone().requires_grad_()
    same([torch.func.grad(loss)(q)], torch.autograd.grad(loss(leaf), [leaf]))
