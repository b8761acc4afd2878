"""Gradients through everything of PyTorch that stands between a call and its backward pass."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from flash_attention import attention, attention_varlen, sdpa
from flash_attention.cached import attention_cached
from flash_attention.compat.transformers import forward as transformers_forward
from flash_attention.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attention.torch_private import sleep

Function = Callable[..., Any]


def random(*shape: int, seed: int = 0) -> Tensor:
    """The same on every device."""
    generator = torch.Generator("cpu").manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, device="cpu").bfloat16().to(torch.get_default_device())


def qkv(seq_len: int = 40, heads: int = 4, d: int = 32) -> list[Tensor]:
    return [random(2, seq_len, heads, d, seed=i).requires_grad_() for i in range(3)]


def loss(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Of the output and of the LSE."""
    out, lse = attention(q, k, v, causal=True, return_lse=True, deterministic=True, **options)
    return out.float().square().sum() + lse.sin().sum()


def gradients(function: Function, inputs: list[Tensor], *arguments: Any) -> list[Tensor]:
    return list(torch.autograd.grad(function(*inputs, *arguments), inputs))


def same(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


# ---------------------------------------------------------------------- compilers
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_holds_both_passes(dynamic: bool) -> None:
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seq_len in (40, 33):
        inputs = qkv(seq_len)
        same(gradients(compiled, inputs), gradients(loss, inputs))


def test_one_graph_of_each_layout() -> None:
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0]).requires_grad_()
    offsets, used = torch.tensor([0, 30, 70]).int(), torch.tensor([40, 7]).int()

    def packed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        rows = (x.flatten(0, 1) for x in (q, k, v))
        out = attention_varlen(*rows, offsets, offsets, 40, 40, window=(9, 2), softcap=3.0, sinks=sinks)
        return out.float().square().sum()

    def cached(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return attention_cached(q, k, v, used, causal=True, sinks=sinks).float().square().sum()

    for function in (packed, cached):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        inputs = [q, k, v, sinks]
        same(gradients(compiled, inputs), gradients(function, inputs))


def test_a_gradient_that_is_not_wanted_is_not_in_the_graph() -> None:
    q, k, v = qkv()
    inputs = [q, k.detach(), v]

    def two(q: Tensor, v: Tensor) -> Tensor:
        return loss(q, inputs[1], v)

    compiled = torch.compile(two, fullgraph=True, backend="aot_eager")
    same(gradients(compiled, [q, v]), gradients(two, [q, v]))


def test_aot_autograd_sees_both_operators() -> None:
    from functorch.compile import aot_function, make_boxed_func

    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return make_boxed_func(graph.forward)

    inputs = qkv()
    function = aot_function(loss, fw_compiler=keep, bw_compiler=keep)
    same(gradients(function, inputs), gradients(loss, inputs))
    forward, backward = graphs
    assert "flash_attention.attention.default" in forward
    assert "flash_attention.attention_backward.default" in backward


def test_a_graph_that_was_exported_without_gradients_has_them() -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, causal=True)

    inputs = qkv()
    with torch.no_grad():
        exported = torch.export.export(Layer(), tuple(x.detach() for x in inputs)).module()

    def total(function: Function) -> Function:
        return lambda q, k, v: function(q, k, v).float().square().sum()

    found = gradients(total(exported), inputs)
    right = gradients(total(Layer()), inputs)
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


@pytest.mark.compile
@pytest.mark.only_on("cpu")
def test_inductor_trains() -> None:
    compiled = torch.compile(loss, fullgraph=True)
    inputs = qkv()
    for x, y in zip(gradients(compiled, inputs), gradients(loss, inputs), strict=True):
        torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)


def test_opcheck_of_gradients() -> None:
    q, k, v = qkv(24)
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0]).requires_grad_()
    ops = torch.ops.flash_attention
    without_mod = (None, [], [], [])
    plain = (None, True, None, None, None, 0.0, True, None, None, None, True, None, None, *without_mod)
    everything = (sinks, False, 0.5, 4, 2, 3.0, False, None, None, None, True, None, None, *without_mod)
    torch.library.opcheck(ops.attention.default, (q, k, v, *plain, True))
    torch.library.opcheck(ops.attention.default, (q, k, v, *everything, True))
    rows = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    offsets = torch.tensor([0, 24, 48]).int()
    torch.library.opcheck(
        ops.attention_varlen.default, (*rows, offsets, offsets, 24, 24, False, *everything, True)
    )
    used = torch.tensor([20, 3]).int()
    torch.library.opcheck(ops.attention_cached.default, (q, k, v, used, None, False, *plain, True))
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    for wanted in ((True, True, True, False), (False, True, False, False)):
        torch.library.opcheck(
            ops.attention_backward.default,
            (out, torch.ones_like(lse), out, lse, q, k, v, *plain, *wanted, []),
        )


def test_a_second_derivative_of_a_compiled_call_is_refused() -> None:
    inputs = qkv(8)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(*inputs).float().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="aot_autograd does not currently support double backward"):
        grad.float().sum().backward()


def test_a_second_derivative_of_an_operator_is_refused() -> None:
    q, k, v = qkv(8)
    options = (None, True, None, None, None, 0.0, True, None, None, None, False, None, None)
    out, _ = torch.ops.flash_attention.attention(q, k, v, *options, None, [], [], [], False)
    (grad,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="gradient of attention's gradients"):
        grad.float().sum().backward()


# ---------------------------------------------------------------------- torch.func
def test_functional_gradients() -> None:
    inputs = qkv()
    expected = gradients(loss, inputs)
    plain = [x.detach() for x in inputs]
    same(torch.func.grad(loss, argnums=(0, 1, 2))(*plain), expected)
    value, pull = torch.func.vjp(loss, *plain)
    same(pull(torch.ones_like(value)), expected)
    assert torch.equal(value, loss(*plain))


def test_functional_gradients_of_packed_sequences() -> None:
    rows = [x.detach().flatten(0, 1) for x in qkv()]
    offsets = torch.tensor([0, 30, 80]).int()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_varlen(q, k, v, offsets, offsets, 50, 50, causal=True).float().square().sum()

    expected = gradients(function, [x.clone().requires_grad_() for x in rows])
    same(torch.func.grad(function, argnums=(0, 1, 2))(*rows), expected)


def test_a_second_functional_derivative_is_refused() -> None:
    q, k, v = (x.detach() for x in qkv(8))

    def first(q: Tensor) -> Tensor:
        return torch.func.grad(lambda q: loss(q, k, v))(q).float().sum()

    with pytest.raises(NotImplementedError, match="gradient of attention's gradients"):
        torch.func.grad(first)(q)


def test_functional_call_of_a_module() -> None:
    layer, x = Attention(), random(2, 16, 64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def total(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).float().square().sum()

    found = torch.func.grad(total)(parameters)
    total_of = layer(x).float().square().sum()
    expected = torch.autograd.grad(total_of, list(layer.parameters()))
    same(found.values(), expected)


# ---------------------------------------------------------------------- autograd's own devices
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(use_reentrant: bool) -> None:
    inputs = qkv()

    def function(*inputs: Tensor) -> Tensor:
        return checkpoint(loss, *inputs, use_reentrant=use_reentrant)

    if use_reentrant:  # it takes backward() alone
        function(*inputs).backward()
        found = [x.grad for x in inputs]
    else:
        found = gradients(function, inputs)
    same(found, gradients(loss, inputs))


def test_selective_checkpoints_of_compiled_calls() -> None:
    inputs = qkv()
    compiled = torch.compile(
        lambda *inputs: checkpoint(loss, *inputs, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    same(gradients(compiled, inputs), gradients(loss, inputs))


def test_hooks_on_what_is_saved() -> None:
    inputs = qkv()
    expected = gradients(loss, inputs)
    with torch.autograd.graph.save_on_cpu():
        found = gradients(loss, inputs)
    same(found, expected)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        total = loss(*inputs)
    same(torch.autograd.grad(total, inputs), expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x.float()),
        ("k", lambda x: x[:, :-1]),
        ("v", lambda x: x[..., :-8]),
        ("k", lambda x: x[:1]),
        ("out", lambda x: x[:, :-1]),
        ("lse", lambda x: x[..., :-1]),
        ("lse", lambda x: x.double()),
        ("sinks", lambda x: x[:-1]),
        ("q", lambda x: x.to("meta")),
        ("every", lambda x: x.float()),
    ],
)
def test_hooks_that_give_back_something_else_are_refused(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    """A kernel would read beside it."""
    names = iter(("q", "k", "v", "sinks", "out", "lse"))
    saved = [torch.randn(2, 6, h, 16).half().requires_grad_() for h in (4, 2, 2)]

    def pack(x: Tensor) -> tuple[str, Tensor]:
        return next(names), x

    def unpack(given: tuple[str, Tensor]) -> Tensor:
        return change(given[1]) if name in (given[0], "every") else given[1]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = attention(*saved, sinks=torch.zeros(4))
    changed = "q" if name == "every" else "v" if name == "k" and change(saved[1]).shape[0] == 2 else name
    with pytest.raises(ValueError, match=rf"^{changed} came back from autograd as .*saved_tensors_hooks"):
        out.sum().backward()


def test_hooks_on_tensors_and_accumulation() -> None:
    inputs = qkv()
    expected = gradients(loss, inputs)
    seen = []
    inputs[0].register_hook(lambda grad: seen.append(grad.clone()))
    for _ in range(2):
        loss(*inputs).backward()
    assert torch.equal(seen[0], expected[0])
    for x, grad in zip(inputs, expected, strict=True):
        torch.testing.assert_close(x.grad, 2 * grad)


def test_anomaly_mode_and_multiprocessing_threads() -> None:
    inputs = qkv()
    expected = gradients(loss, inputs)
    with torch.autograd.detect_anomaly(check_nan=True):
        same(gradients(loss, inputs), expected)
    results: dict[int, list[Tensor]] = {}

    def work(i: int) -> None:
        mine = [x.detach().clone().requires_grad_() for x in inputs]
        for _ in range(5):
            results[i] = gradients(loss, mine)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for found in results.values():
        same(found, expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_gives_gradients_to_float32_leaves(device: str, compiled: bool) -> None:
    inputs = [x.detach().float().requires_grad_() for x in qkv()]

    def function(*inputs: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss(*inputs)

    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    found = gradients(run, inputs)
    assert all(grad.dtype is torch.float32 for grad in found)
    expected = gradients(loss, [x.detach().bfloat16().requires_grad_() for x in inputs])
    same([x.bfloat16() for x in found], expected)


def test_autocast_of_16_bit_inputs_changes_nothing(device: str) -> None:
    inputs = qkv()
    expected = gradients(loss, inputs)
    with torch.autocast(device, torch.float16):
        found = gradients(loss, inputs)
    same(found, expected)


def test_a_dispatch_mode_sees_both_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.add(str(function))
            return function(*args, **(kwargs or {}))

    names: set[str] = set()
    inputs = qkv()
    expected = gradients(loss, inputs)
    with Names():
        same(gradients(loss, inputs), expected)
    assert {"flash_attention.attention.default", "flash_attention.attention_backward.default"} <= names


def test_tensors_without_numbers_have_gradients() -> None:
    inputs = [x.detach().to("meta").requires_grad_() for x in qkv()]
    for x, grad in zip(inputs, gradients(loss, inputs), strict=True):
        assert (grad.shape, grad.dtype, grad.device, grad.stride()) == (
            x.shape,
            x.dtype,
            x.device,
            x.stride(),
        )


# ---------------------------------------------------------------------- streams and graphs
@pytest.mark.only_on("cuda")
def test_a_cuda_graph_of_both_passes() -> None:
    inputs = qkv()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(loss, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(loss, inputs)
    for seed in range(10, 13):
        with torch.no_grad():
            for i, x in enumerate(inputs):
                x.copy_(random(*x.shape, seed=seed + i))
        graph.replay()
        same(found, gradients(loss, inputs))


@pytest.mark.only_on("cuda")
def test_a_gradient_that_comes_late_is_waited_for() -> None:
    """What makes the output's gradient ends long after the backward pass was queued behind it."""
    q, k, v = qkv(300)
    grad_out = random(2, 300, 4, 32)
    out = attention(q, k, v, causal=True, deterministic=True)
    expected = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
    for _ in range(20):
        late = torch.full_like(grad_out, float("nan"))
        torch.cuda.synchronize()
        sleep(20_000_000)
        late.copy_(grad_out)
        same(torch.autograd.grad(out, (q, k, v), late, retain_graph=True), expected)


@pytest.mark.only_on("cuda")
def test_equal_gradients_beside_a_busy_stream() -> None:
    inputs = qkv(700)
    expected = gradients(loss, inputs)
    busy, x = torch.cuda.Stream(), torch.randn(2048, 2048)
    for _ in range(200):
        with torch.cuda.stream(busy):
            x = (x @ x).tanh()
        same(gradients(loss, inputs), expected)
    torch.cuda.synchronize()


# ---------------------------------------------------------------------- other libraries' names
def expected_gradients(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, *, causal: bool = False, group: int = 1
) -> list[Tensor]:
    """In float64, (batch, seq, heads, d)."""
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    rows = [x.transpose(1, 2) for x in wide]
    rows[1:] = [x.repeat_interleave(group, 1) for x in rows[1:]]
    out = scaled_dot_product_attention(*rows, is_causal=causal).transpose(1, 2)
    return list(torch.autograd.grad(out, wide, grad_out.double()))


def close(found: Any, expected: Any) -> None:
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, atol=6e-2, rtol=2e-2)


def test_sdpa() -> None:
    q, k, v = qkv()
    grad_out = random(2, 40, 4, 32)
    out = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    found = torch.autograd.grad(out, (q, k, v), grad_out.transpose(1, 2))
    close(found, expected_gradients(q, k, v, grad_out, causal=True))


@pytest.mark.parametrize("d", [32, 12])
def test_flash_attn_names(d: int) -> None:
    q, k, v = qkv(d=d)
    grad_out = random(2, 40, 4, d)
    right = expected_gradients(q, k, v, grad_out, causal=True)
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    close(torch.autograd.grad(flash_attn_func(q, k, v, **options), (q, k, v), grad_out), right)
    kv = torch.stack((k, v), 2).detach().requires_grad_()
    dq, dkv = torch.autograd.grad(flash_attn_kvpacked_func(q, kv, **options), (q, kv), grad_out)
    close((dq, *dkv.unbind(2)), right)
    qkv_ = torch.stack((q, k, v), 2).detach().requires_grad_()
    (dqkv,) = torch.autograd.grad(flash_attn_qkvpacked_func(qkv_, **options), qkv_, grad_out)
    close(dqkv.unbind(2), right)


@pytest.mark.parametrize("d", [32, 12])
def test_flash_attn_names_of_packed_sequences(d: int) -> None:
    q, k, v = qkv(d=d)
    grad_out = random(2, 40, 4, d)
    right = [x.flatten(0, 1) for x in expected_gradients(q, k, v, grad_out, causal=True)]
    offsets = torch.tensor([0, 40, 80]).int()
    packing = (offsets, offsets, 40, 40)
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    rows = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
    dout = grad_out.flatten(0, 1)
    close(torch.autograd.grad(flash_attn_varlen_func(*rows, *packing, **options), rows, dout), right)
    kv = torch.stack(rows[1:], 1).detach().requires_grad_()
    out = flash_attn_varlen_kvpacked_func(rows[0], kv, *packing, **options)
    dq, dkv = torch.autograd.grad(out, (rows[0], kv), dout)
    close((dq, *dkv.unbind(1)), right)
    packed = torch.stack(rows, 1).detach().requires_grad_()
    out = flash_attn_varlen_qkvpacked_func(packed, offsets, 40, **options)
    close(torch.autograd.grad(out, packed, dout)[0].unbind(1), right)


def test_flash_attn_gradient_of_the_lse() -> None:
    q, k, v = qkv()
    _, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert dq.any()
    assert dk.any()
    assert not dv.any()


def test_a_cache_has_no_gradient() -> None:
    q, k, v = qkv()
    with pytest.raises(NotImplementedError, match="q, k_cache, v_cache require grad"):
        flash_attn_with_kvcache(q, k, v)
    with torch.no_grad():
        flash_attn_with_kvcache(q, k, v)


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("mask", ["none", "padding", "packed"])
def test_transformers_training(mask: str) -> None:
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in qkv())
    tokens, more = None, {}
    if mask == "padding":
        tokens = torch.ones(2, 40, dtype=torch.bool)
        tokens[1, 25:] = False
    elif mask == "packed":
        more = {"position_ids": torch.cat((torch.arange(25), torch.arange(15)))[None].expand(2, -1)}
    layer = Layer().train()
    out, _ = transformers_forward.attention_forward(
        layer, q, k, v, tokens, dropout=0.0, deterministic=True, **more
    )
    grad_out = random(2, 40, 4, 32)
    found = torch.autograd.grad(out, (q, k, v), grad_out)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    visible = torch.ones(40, 40, dtype=torch.bool).tril()[None, None].expand(2, 1, 40, 40).clone()
    if mask == "padding":
        visible[1, :, :, 25:] = False
        grad_out = grad_out.clone()
        grad_out[1, 25:] = 0
    elif mask == "packed":
        visible[:, :, 25:, :25] = False
    right = scaled_dot_product_attention(*wide, attn_mask=visible).transpose(1, 2)
    close(found, torch.autograd.grad(right, wide, grad_out.double()))


# ---------------------------------------------------------------------- several processes
class Attention(torch.nn.Module):
    """Self-attention with its projections, in bfloat16."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.qkv = torch.nn.Linear(width, 3 * width, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(width, width, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.out(attention(q, k, v, causal=True).flatten(2))


def _train_sharded(rank: int, port: int, results: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    layer = Attention()
    fully_shard(layer, mesh=mesh)
    layer(random(2, 16, 64, seed=rank)).float().square().mean().backward()
    grads = [p.grad.full_tensor().float().tolist() for p in layer.parameters()]
    if rank == 0:
        results.put(grads)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.only_on("cpu")
def test_fully_sharded_training_on_two_processes() -> None:
    import socket

    if not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_train_sharded, args=(rank, port, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = results.get(timeout=240)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    layer = Attention()
    totals = [layer(random(2, 16, 64, seed=rank)).float().square().mean() for rank in range(2)]
    (sum(totals) / 2).backward()
    for grad, p in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(torch.tensor(grad), p.grad.float(), atol=2e-3, rtol=4e-2)
