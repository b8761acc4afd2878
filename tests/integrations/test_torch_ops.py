"""The operators: what tracing sees is what eager calls return, without graph breaks or recompilations."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import flash_attention
from flash_attention import attention, attention_varlen
from flash_attention.cached import attention_cached
from flash_attention.mods import trace
from flash_attention.run.operator_schema import SentMod
from flash_helpers.kernel_configs import parse_kernel_name_into_config

BATCH, HEADS, HEADS_KV, D_HEAD = 2, 4, 2, 64
CONFIG = parse_kernel_name_into_config(
    "(FP16, 64, 64, 64, 4): async+eager+swizzled+load_0_0_0_tiles+opt_softmax"
)


def ramp(shape: tuple[int, ...], factor: int, dtype: torch.dtype = torch.float16) -> Tensor:
    n = torch.arange(torch.Size(shape).numel())
    return (((factor * n) % 257 - 128) / 64).reshape(shape).to(dtype)


def qkv(seq_len: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    kv_shape = (BATCH, seq_len, HEADS_KV, D_HEAD)
    return (
        ramp((BATCH, seq_len, HEADS, D_HEAD), 5, dtype),
        ramp(kv_shape, 7, dtype),
        ramp(kv_shape, 11, dtype),
    )


def layouts(seq_len: int) -> dict[str, Tensor]:
    """One input of (batch, seq_len, HEADS, D_HEAD) in three layouts."""
    x = ramp((BATCH, seq_len, HEADS, D_HEAD), 5)
    packed = torch.stack([x, x + 1, x + 2], dim=2)
    return {
        "contiguous": x,
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "slice of packed qkv": packed[:, :, 0],
    }


def packed(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    q, k, v = (x.flatten(0, 1)[: sum(lengths)] for x in qkv(sum(lengths)))
    return q, k, v, offsets, max(lengths)


# ---------------------------------------------------------------------- torch.compile
@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("layout", ["contiguous", "heads first", "slice of packed qkv"])
def test_one_graph_for_all_lengths(layout: str) -> None:
    weight = ramp((HEADS * D_HEAD, 8), 3)

    def layer(x: Tensor) -> Tensor:
        batch, seq_len = x.shape[:2]
        return attention(x, x, x, causal=True).reshape(batch, seq_len, HEADS * D_HEAD) @ weight

    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    graphs = []
    for seq_len in (128, 200, 259, 77):
        x = layouts(seq_len)[layout]
        torch.testing.assert_close(compiled(x), layer(x), atol=0, rtol=0)
        graphs.append(counter.frame_count)
    assert graphs == [1, 2, 2, 2]  # the second one has a dynamic length


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "softmax_scale": 0.25},
        {"window": (7, 3), "softcap": 5.0, "return_lse": True},
        {"sinks": True, "return_lse": True},
        {"config": CONFIG},
        {"backend": True},
        {"out_dtype": torch.float32, "n_sms": 3, "causal": True, "return_lse": True},
        {"diagonal_offset": -3, "window": (9, 1)},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_every_option_is_traced(options: dict, device: str) -> None:
    q, k, v = qkv(70)
    if "sinks" in options:
        options = {**options, "sinks": ramp((HEADS,), 3)}
    if "backend" in options:
        options = {**options, "backend": device}
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, **options), attention(q, k, v, **options), atol=0, rtol=0)
    if "config" in options:
        assert flash_attention.last_kernel().config == CONFIG


def test_out_is_written_in_place() -> None:
    q, k, v = qkv(70)
    out = torch.full_like(q, torch.nan)
    compiled = torch.compile(
        lambda q, k, v, out: attention(q, k, v, out=out) + 1, fullgraph=True, backend="aot_eager"
    )
    result = compiled(q, k, v, out)
    assert (out == attention(q, k, v)).all()
    assert (result == out + 1).all()


@pytest.mark.compile
def test_inductor_on_a_layer() -> None:
    """The default compiler: what surrounds the call is fused, and the strides it assumes are right."""
    weight = ramp((D_HEAD, 3 * HEADS * D_HEAD), 3) / 16

    def layer(x: Tensor) -> Tensor:
        q, k, v = (x @ weight).reshape(BATCH, -1, 3, HEADS, D_HEAD).unbind(2)
        return attention(q.sin(), k, v, causal=True).transpose(1, 2).flatten(2) * 2

    x = ramp((BATCH, 40, D_HEAD), 5)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), atol=2e-2, rtol=2e-2)


def test_varlen_has_one_graph() -> None:
    counter = CompileCounter()
    compiled = torch.compile(attention_varlen, fullgraph=True, backend=counter)
    graphs = []
    for lengths in ([20, 31], [7, 50], [44, 45], [1, 99]):
        q, k, v, offsets, longest = packed(lengths)
        arguments = (q, k, v, offsets, offsets, longest, longest)
        out, lse = compiled(*arguments, causal=True, return_lse=True)
        expected, expected_lse = attention_varlen(*arguments, causal=True, return_lse=True)
        assert (out == expected).all()
        assert (lse == expected_lse).all()
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[1] <= 2


def test_a_length_that_is_read_from_a_tensor_is_not_compared() -> None:
    """What is read while tracing is a symbol, of which nothing is known."""
    q, k, v, offsets, longest = packed([20, 31])

    def layer(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        longest = offsets.diff().max().item()
        return attention_varlen(q, k, v, offsets, offsets, longest, longest, causal=True)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        got = compiled(q, k, v, offsets)
    assert (got == attention_varlen(q, k, v, offsets, offsets, longest, longest, causal=True)).all()


def test_a_negative_length_is_refused_while_tracing() -> None:
    q, k, v, offsets, _ = packed([20, 31])
    compiled = torch.compile(attention_varlen, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="max_seqlen_k is -1; it must be an int, at least 0"):
        compiled(q, k, v, offsets, offsets, 31, -1)
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"diagonal_offset is 1\.5; it must be an int"):
        compiled(*qkv(16), diagonal_offset=1.5)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, -3)}, {"window": (-2, None)}])
def test_offsets_that_change_compile_once(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph.forward

    compiled = torch.compile(attention, fullgraph=True, backend=backend, dynamic=True)
    for offset in (3, -2, 5, -7, 11):
        given = qkv(16)
        found = compiled(*given, diagonal_offset=offset, **options)
        assert torch.equal(found, attention(*given, diagonal_offset=offset, **options))
    assert len(graphs) <= 3  # no recompilation for each offset


def test_tangents_of_an_operator_are_refused() -> None:
    """Under a mode, calls become operators, below which nobody sees who wants a derivative."""
    q, k, v = qkv(16)
    with FlopCounterMode(display=False), pytest.raises(NotImplementedError, match="tangent"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))


def test_what_has_no_gradient_is_refused_while_tracing() -> None:
    q, k, v = qkv(16)
    q.requires_grad_()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="pass out=None"):
        compiled(q, k, v, out=torch.empty_like(q))
    with torch.no_grad():
        assert (compiled(q, k, v) == attention(q, k, v)).all()


def test_wrong_arguments_are_refused_while_tracing() -> None:
    q, k, v = qkv(16)
    with pytest.raises(Exception, match="must be a multiple of those of"):
        torch.compile(attention, fullgraph=True, backend="aot_eager")(q[:, :, :3], k, v)


@pytest.mark.only_on("cpu")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"causal": "no"}, "causal is 'no'; it must be True or False"),
        ({"return_lse": 2}, "return_lse is 2; it must be True or False"),
        ({"softmax_scale": "0.5"}, "softmax_scale is '0.5'; it must be a real number"),
        ({"softcap": "0.5"}, "softcap is '0.5'; it must be a real number"),
        ({"config": "(FP16, 64)"}, "config is a str; it must be a FlashForwardKernelConfig"),
    ],
)
def test_wrong_options_are_refused_on_meta_tensors(options: dict, text: str) -> None:
    q, k, v = (x.to("meta") for x in qkv(16))
    with pytest.raises(TypeError, match=re.escape(text)):
        attention(q, k, v, **options)


@pytest.mark.only_on("cpu")
def test_wrong_shapes_are_refused_on_meta_tensors() -> None:
    q, k, v = (x.to("meta") for x in qkv(16))
    with pytest.raises(ValueError, match="must be a multiple of those of"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(TypeError, match="the element types are"):
        attention(q.float(), k, v)


# ---------------------------------------------------------------------- export, other tracers
@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_length(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, causal=True) * 2

    seq_len = torch.export.Dim("seq_len", min=2, max=4096)
    shapes = {name: {1: seq_len} for name in "qkv"}
    program = torch.export.export(Layer(), qkv(64), dynamic_shapes=shapes, strict=strict)
    targets = [node.target for node in program.graph.nodes]
    assert torch.ops.flash_attention.attention.default in targets
    q, k, v = qkv(93)
    assert (program.module()(q, k, v) == attention(q, k, v, causal=True) * 2).all()


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_window_that_depends_on_the_length(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, window=(q.shape[1] // 2, 0))

    seq_len = torch.export.Dim("seq_len", min=2, max=4096)
    shapes = {name: {1: seq_len} for name in "qkv"}
    program = torch.export.export(Layer(), qkv(64), dynamic_shapes=shapes, strict=strict)
    q, k, v = qkv(93)
    assert (program.module()(q, k, v) == attention(q, k, v, window=(46, 0))).all()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_call(mode: str) -> None:
    q, k, v = qkv(64)
    graph = make_fx(lambda q, k, v: attention(q, k, v), tracing_mode=mode)(q, k, v)
    assert torch.ops.flash_attention.attention.default in [node.target for node in graph.graph.nodes]
    assert (graph(q + 1, k, v) == attention(q + 1, k, v)).all()


# ---------------------------------------------------------------------- fake tensors
def described(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype


@pytest.mark.parametrize("layout", ["contiguous", "heads first", "slice of packed qkv"])
@pytest.mark.parametrize("where", ["fake", "fake outside its mode", "meta"])
def test_fake_results_are_like_real_ones(layout: str, where: str) -> None:
    x = layouts(48)[layout]
    mode = FakeTensorMode()
    if where == "meta":
        fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    else:
        fake = mode.from_tensor(x)
    with mode if where == "fake" else contextlib.nullcontext():
        results = attention(fake, fake, fake[..., :32], return_lse=True)
    for got, real in zip(results, attention(x, x, x[..., :32], return_lse=True), strict=True):
        assert described(got) == described(real)
        assert got.device == fake.device


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"causal": "False"}, TypeError, "causal is 'False'; it must be True or False"),
        ({"return_lse": None}, TypeError, "return_lse is None"),
        ({"window": 3}, TypeError, "window is 3; it must be two values"),
        ({"window": (1.5, 0)}, TypeError, "left limit is 1.5"),
        ({"softcap": -1.0}, ValueError, "softcap is -1.0; it must be finite"),
        ({"softcap": math.nan}, ValueError, "softcap is nan"),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale is inf; it must be finite"),
        ({"softmax_scale": 1e39}, ValueError, r"softmax_scale is 1e\+39"),
        ({"config": "fast"}, TypeError, "config is a str"),
        ({"backend": "gpu"}, ValueError, "backend is 'gpu'"),
    ],
)
def test_options_are_refused_without_numbers_too(where: str, options: dict, error: type, text: str) -> None:
    x = torch.empty(1, 4, 2, 64, dtype=torch.float16)
    x = x.to("meta") if where == "meta" else FakeTensorMode().from_tensor(x)
    with pytest.raises(error, match=text):
        attention(x, x, x, **options)


@pytest.mark.parametrize("where", ["fake", "meta"])
def test_tensors_are_refused_without_numbers_too(where: str) -> None:
    def like(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        return x.to("meta") if where == "meta" else mode.from_tensor(x)

    mode = FakeTensorMode()
    x = like(1, 4, 2, 64)
    assert attention(x, x, x, out=like(1, 4, 2, 64)).shape == x.shape
    with pytest.raises(ValueError, match="head size of q and k is 7"):
        attention(*[like(1, 4, 2, 7)] * 3)
    with pytest.raises(ValueError, match="q has 3 heads and k and v have 2"):
        attention(like(1, 4, 3, 64), x, x)
    with pytest.raises(TypeError, match=r"the element types are q torch\.float32"):
        attention(*[like(1, 4, 2, 64, dtype=torch.float32)] * 3)
    with pytest.raises(ValueError, match=r"out has shape \(3,\); the result has \(1, 4, 2, 64\)"):
        attention(x, x, x, out=like(3))
    with pytest.raises(TypeError, match=r"out is torch\.bfloat16"):
        attention(x, x, x, out=like(1, 4, 2, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="out's last stride is 2"):
        attention(x, x, x, out=like(1, 4, 2, 128)[..., ::2])
    with pytest.raises(ValueError, match="stride of dimension 1 is 130 elements"):
        attention(x, x, x, out=like(1, 4, 2, 65)[..., :64])
    with pytest.raises(ValueError, match="elements of out share memory"):
        attention(x, x, x, out=like(1, 1, 2, 64).expand(1, 4, 2, 64))


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int64)}, TypeError, r"cu_seqlens_q is torch\.int64"),
        (
            {"cu_seqlens_k": torch.zeros(3, 1, dtype=torch.int32)},
            ValueError,
            r"cu_seqlens_k has shape \(3, 1\)",
        ),
        ({"cu_seqlens_k": torch.zeros(2, dtype=torch.int32)}, ValueError, "3 entries, cu_seqlens_k 2"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1"),
        ({"max_seqlen_k": 4.0}, TypeError, r"max_seqlen_k is 4\.0; it must be an int"),
        ({"max_seqlen_k": True}, TypeError, "max_seqlen_k is True; it must be an int"),
        ({"validate": "no"}, TypeError, "validate is 'no'; it must be True or False"),
    ],
)
def test_packing_is_refused_without_numbers_too(where: str, change: dict, error: type, text: str) -> None:
    mode = FakeTensorMode()
    offsets = torch.zeros(3, dtype=torch.int32)
    given: dict = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 4, "max_seqlen_k": 4}
    given = dict.fromkeys("qkv", torch.empty(8, 2, 64, dtype=torch.float16)) | given | change
    for name, x in given.items():
        if isinstance(x, Tensor):
            given[name] = x.to("meta") if where == "meta" else mode.from_tensor(x.to(offsets.device))
    with pytest.raises(error, match=text):
        attention_varlen(**given)


@pytest.mark.parametrize("where", ["fake", "meta"])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"seqused_k": torch.zeros(2, dtype=torch.int64)}, TypeError, r"seqused_k is torch\.int64"),
        ({"seqused_k": torch.zeros(3, dtype=torch.int32)}, ValueError, r"seqused_k has shape \(3,\)"),
        ({"block_table": torch.zeros(2, 1)}, TypeError, r"block_table is torch\.float32"),
        (
            {"block_table": torch.zeros(1, 1, dtype=torch.int32)},
            ValueError,
            r"block_table has shape \(1, 1\)",
        ),
        ({"validate": 2}, TypeError, "validate is 2; it must be True or False"),
    ],
)
def test_caches_are_refused_without_numbers_too(where: str, change: dict, error: type, text: str) -> None:
    mode = FakeTensorMode()
    given: dict = dict.fromkeys("qkv", torch.empty(2, 4, 2, 64, dtype=torch.float16))
    given |= {"seqused_k": torch.zeros(2, dtype=torch.int32)} | change
    for name, x in given.items():
        if isinstance(x, Tensor):
            given[name] = x.to("meta") if where == "meta" else mode.from_tensor(x)
    with pytest.raises(error, match=text):
        attention_cached(**given)


@pytest.mark.parametrize("options", [{"softcap": -1.0}, {"softmax_scale": math.inf}], ids=str)
def test_compiled_numbers_are_looked_at(options: dict) -> None:
    (name,) = options
    compiled = torch.compile(lambda x: attention(x, x, x, **options), backend="aot_eager")
    with pytest.raises(Exception, match=f"{name} is "):
        compiled(torch.ones(1, 4, 2, 64, dtype=torch.float16))


def test_compiled_flags_are_true_or_false() -> None:
    q, k, v = qkv(8)
    torch._dynamo.reset()
    compiled = torch.compile(lambda flag: attention(q, k, v, causal=flag), backend="eager")
    with pytest.raises(TypeError, match="causal is 'False'; it must be True or False"):
        compiled("False")


def test_fake_packed_results_are_like_real_ones() -> None:
    q, k, v, offsets, longest = packed([3, 5])
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in (q, k, v, offsets, offsets)]
    got = attention_varlen(*fakes, longest, longest, return_lse=True)
    real = attention_varlen(q, k, v, offsets, offsets, longest, longest, return_lse=True)
    assert list(map(described, got)) == list(map(described, real))


def test_a_fake_tensor_among_real_ones_is_refused() -> None:
    q, k, v = qkv(16)
    with pytest.raises(Exception, match="FakeTensor"):
        attention(q, FakeTensorMode().from_tensor(k), v)


@pytest.mark.parametrize("name", ["sinks", "out", "cu_seqlens_k", "seqused_k", "block_table"])
def test_a_fake_tensor_beside_real_ones_is_refused(name: str) -> None:
    """It has no address that a kernel could read."""
    q, k, v = qkv(16)
    numbers = torch.tensor([0, 16], dtype=torch.int32)
    others = {"sinks": torch.zeros(HEADS), "out": torch.empty_like(q), "cu_seqlens_k": numbers}
    others |= {"seqused_k": numbers, "block_table": numbers[:, None]}
    fake = FakeTensorMode().from_tensor(others[name])
    calls = {
        "sinks": lambda: attention(q, k, v, sinks=fake),
        "out": lambda: attention(q, k, v, out=fake),
        "cu_seqlens_k": lambda: attention_varlen(q[0], k[0], v[0], numbers, fake, 16, 16),
        "seqused_k": lambda: attention_cached(q, k, v, fake),
        "block_table": lambda: attention_cached(q, k, v, numbers, block_table=fake),
    }
    with pytest.raises(Exception, match="FakeTensor"):
        calls[name]()


# ---------------------------------------------------------------------- autocast
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(compiled: bool, dtype: torch.dtype, device: str) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device, dtype):
            return attention(q, k, v)

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    q, k, v = qkv(20, torch.float32)
    assert (run(q, k, v.bfloat16()) == attention(q.to(dtype), k.to(dtype), v.bfloat16().to(dtype))).all()
    half = qkv(20, torch.float16)
    assert run(*half).dtype is torch.float16  # one 16-bit type: left as it is


def test_autocast_on_packed_sequences(device: str) -> None:
    q, k, v, offsets, longest = packed([3, 5])
    with torch.autocast(device, torch.bfloat16):
        out = attention_varlen(q.float(), k, v, offsets, offsets, longest, longest)
    assert out.dtype is torch.bfloat16


# ---------------------------------------------------------------------- the operators themselves
OPCHECKS = (
    "attention", "attention of a transposed view", "attention_out", "attention_varlen",
    "attention_varlen_out", "attention_cached", "attention_cached with pages", "attention_cached_out",
)  # fmt: skip


def opcheck_arguments(name: str) -> tuple[Any, ...]:
    """What an operator is checked with."""
    q, k, v = qkv(24)
    without_mod = (None, [], [], [])
    options = (None, True, None, None, None, 0.0, True, None, torch.float32, 5, False, None, None)
    options += without_mod
    rows = (*(x.flatten(0, 1) for x in (q, k, v)), *2 * [torch.tensor([0, 24, 48]).int()], 24, 24, False)
    with_sinks = (ramp((HEADS,), 3), False, 0.5, 4, 2, 3.0, False, None, None, None, False, None, None)
    with_sinks += without_mod
    used, table = torch.tensor([20, 3]).int(), torch.tensor([[1, 0], [2, -1]]).int()
    pages = [torch.cat((x, x))[:3, :16] for x in (k, v)]
    empty = [k.new_zeros(2, 4, 24, 64) for _ in range(2)]
    every: dict[str, tuple[Any, ...]] = {
        "attention": (q, k, v, *options, False),
        "attention of a transposed view": (q.transpose(1, 2), *empty, None, *with_sinks[1:], False),
        "attention_out": (q, k, v, *with_sinks, torch.empty_like(q)),
        "attention_varlen": (*rows, *options, True),
        "attention_varlen_out": (*rows, *options, torch.empty_like(rows[0], dtype=torch.float32)),
        "attention_cached": (q, k, v, used, None, False, *options, False),
        "attention_cached with pages": (q, *pages, used, table, True, *options, False),
        "attention_cached_out": (q, *pages, used, table, False, *with_sinks, torch.empty_like(q)),
    }
    assert tuple(every) == OPCHECKS
    return every[name]


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str) -> None:
    """One operator a test: on a GPU each compiles a kernel of its own, and a test has a time limit."""
    operator = getattr(torch.ops.flash_attention, name.partition(" ")[0]).default
    torch.library.opcheck(operator, opcheck_arguments(name))


def test_opcheck_with_a_mod() -> None:
    """Forward and backward, with gradients of two of three captured tensors."""
    q, k, v = (x.requires_grad_() for x in qkv(24))
    slopes, table = torch.rand(HEADS, requires_grad=True), torch.rand(47, requires_grad=True)
    document, left, factor = torch.arange(24) // 7, 2**40, 0.5
    traced = trace(
        lambda s, b, h, i, j: s * factor + slopes[h] * (j - i) + table[i - j + 23],
        lambda b, h, i, j: (document[i] == document[j]) & (i - j <= left),
    )
    mod = SentMod.of(traced)
    options = (None, False, None, None, None, 0.0, True, None, None, None, False, None, None, *mod)
    ops = torch.ops.flash_attention
    torch.library.opcheck(ops.attention.default, (q, k, v, *options, True))
    out, lse = (x.detach() for x in ops.attention(q, k, v, *options, True))
    given = [x.detach() for x in (torch.ones_like(out), torch.ones_like(lse), out, lse, q, k, v)]
    options = (*options[:-3], [x.detach() for x in traced.tensors], *options[-2:])
    for wanted in ((True, True, True, False, [0, 1]), (False, True, False, False, [1])):
        torch.library.opcheck(ops.attention_backward.default, (*given, *options, *wanted))


def test_eager_calls_do_not_pass_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("an eager call went through the operator")

    monkeypatch.setattr(flash_attention.run.torch_ops, "call", fail)
    q, k, v, offsets, longest = packed([3, 5])
    attention(q[None], k[None], v[None])
    attention_varlen(q, k, v, offsets, offsets, longest, longest)
    attention(torch.nn.Parameter(q[None], requires_grad=False), k[None], v[None])
