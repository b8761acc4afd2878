"""``forward`` on a GPU: streams, graphs, layouts, limits, errors, memory."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from gpu_cases import CONFIG, check_the_callers_stream, inputs

from flash_attention import forward
from flash_attention.backends import cuda
from flash_attention.checks.configs import check_fits_device
from flash_attention.errors import InfeasibleConfigError, KernelLaunchError
from flash_helpers.kernel_configs import DType, ForwardKernel
from flash_helpers.test.utils import QKVConfig, generate_qkv, generate_qkvo, ramp, reference

D = CONFIG.d_head


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16, device="cuda")


def near_reference(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    expected, _ = reference(q, k, v)
    torch.testing.assert_close(o.double(), expected, atol=2e-3, rtol=2e-3)


def works() -> None:
    """The next call on good tensors is right."""
    q, v = zeros(1, 128, 2, D), zeros(1, 128, 2, D).fill_(3)
    assert (forward(CONFIG, q, q.clone(), v) == 3).all()


# ---------------------------------------------------------------------- streams and graphs
def test_the_callers_stream():
    q, k, v, o = (zeros(1, 512, 4, D) for _ in range(4))
    check_the_callers_stream(lambda: forward(CONFIG, q, k, v, o), v, o)


def test_graph_capture():
    q, k, v, o = (zeros(1, 128, 2, D) for _ in range(4))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        forward(CONFIG, q, k, v, o)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert forward(CONFIG, q, k, v, o) is o
        new = forward(CONFIG, q, k, v)
    for value in (2.0, 5.0):
        v.fill_(value)
        o.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert (o == value).all()
        assert (new == value).all()
    for x, a in zip((q, k, v), (5, 7, 11), strict=True):
        x.copy_(ramp(tuple(x.shape), a, device="cuda"))
    graph.replay()
    assert torch.equal(o, forward(CONFIG, q, k, v))


def test_a_trace_computes_and_does_not_repeat_its_example():
    q, k, v = inputs(DType.FP16, D, 128)
    forward(CONFIG, q, k, v)  # a call that is remembered
    traced = torch.jit.trace(lambda *x: forward(CONFIG, *x), (q, k, v), check_trace=False)
    assert CONFIG.short_form() in str(traced.graph)
    for _ in range(2):
        assert torch.equal(traced(2 * q, k, v), forward(CONFIG, 2 * q, k, v))


def test_first_call_of_a_process_inside_a_capture():
    """The kernel is built, so that loading it is all that is left to do during the capture."""
    program = f"""
import torch, flash_attention
from flash_attention.errors import KernelLaunchError
from flash_helpers.kernel_configs import parse_kernel_name_into_config
config = parse_kernel_name_into_config({CONFIG.short_form()!r})
q = torch.zeros(1, 128, 2, 64, dtype=torch.float16, device="cuda")
v = q + 3
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    o = flash_attention.forward(config, q, q, v)
graph.replay()
torch.cuda.synchronize()
assert (o == 3).all()
"""
    run_python(program)


def run_python(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_import_leaves_cuda_to_forked_children():
    run_python("""
import os, torch, flash_attention, flash_attention.backends.cuda
from flash_helpers.kernel_configs import get_kernels_to_build
get_kernels_to_build()
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    ok = torch.ones(4, device="cuda").sum().item() == 4
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
""")


# ---------------------------------------------------------------------- layouts
@pytest.mark.parametrize("dtype", list(DType))
def test_each_tensor_has_its_own_strides(dtype):
    config = dataclasses.replace(CONFIG, dtype=dtype)
    kind, shape = dtype.to_torch_dtype(), (2, 64, 2, D)

    def check(*qkv: torch.Tensor) -> torch.Tensor:
        o = forward(config, *qkv)
        assert torch.equal(o, forward(config, *(x.contiguous() for x in qkv)))
        expected, _ = reference(*qkv)
        tolerance = 2e-3 if dtype is DType.FP16 else 1.6e-2
        torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=tolerance)
        return o

    q, k, v = (ramp(shape, a, kind, "cuda") for a in (5, 7, 11))
    every_second = {a: ramp((2, 128, 2, D), a, kind, "cuda")[:, ::2] for a in (7, 11)}
    o = check(q, every_second[7], v)
    tolerance = 2e-3 if dtype is DType.FP16 else 1.6e-2
    assert o[0, 0, 0, 0].item() == pytest.approx(0.048275, abs=tolerance)
    assert o[0, 63, 1, 63].item() == pytest.approx(-0.306, abs=tolerance)
    check(q, k, every_second[11])
    for which in range(3):
        mixed = [q, k, v]
        mixed[which] = mixed[which].transpose(1, 2).contiguous().transpose(1, 2)
        check(*mixed)
    check(*torch.stack((q, k, v), dim=2).unbind(2))
    check(q, k[:, :, :1].expand(shape), v[:, :, :1].expand(shape))


def test_output_with_strides_of_its_own():
    q, k, v = inputs(DType.FP16, D, 128)
    around = torch.full((1, 2, 256, 2 * D), 7.0, dtype=torch.float16, device="cuda")
    o = around[:, :, 64:192, :D].transpose(1, 2)
    assert forward(CONFIG, q, k, v, o) is o
    assert torch.equal(o, forward(CONFIG, q, k, v))
    o.fill_(7.0)
    assert (around == 7).all()


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_misaligned_addresses(offset):
    shape = (2, 128, 3, D)
    numel = math.prod(shape)
    q, k, v = (zeros(numel + 16)[offset : offset + numel].view(shape) for _ in range(3))
    v.fill_(3)
    if offset % 8:
        with pytest.raises(ValueError, match="16 bytes"):
            forward(CONFIG, q, k, v)
    else:
        assert (forward(CONFIG, q, k, v) == 3).all()
    works()


def test_offsets_past_32_bits():
    base = torch.empty(2**31 + 16384, dtype=torch.float16, device="cuda")
    shape = (2, 64, 1, D)
    q, k, v = (base[o:].as_strided(shape, (2**31, 64, 64, 1)) for o in (0, 4096, 8192))
    for x, a in zip((q, k, v), (5, 7, 11), strict=True):
        x.copy_(ramp(shape, a, device="cuda"))
    o = forward(CONFIG, q, k, v)
    assert torch.equal(o, forward(CONFIG, *(x.contiguous() for x in (q, k, v))))
    near_reference(o, q, k, v)


@pytest.mark.parametrize("shape", [(65536, 64, 1, D), (1, 64, 65536, D), (13108, 64, 5, D)])
def test_more_than_65535_items(shape):
    q, k = (ramp((1, 64, 1, D), a, device="cuda").expand(shape) for a in (5, 7))
    v = ramp((1, 64, 1, D), 11, device="cuda") * torch.ones(shape, dtype=torch.float16, device="cuda")
    v[-1, :, -1] *= 0.5
    o = torch.full(shape, math.nan, dtype=torch.float16, device="cuda")
    forward(CONFIG, q, k, v, o)
    for item in ((slice(0, 1), slice(None), slice(0, 1)), (slice(-1, None), slice(None), slice(-1, None))):
        near_reference(o[item], q[item], k[item], v[item])
    assert not o.isnan().any()
    assert (o[:-1] == o[0, :, :1]).all() if shape[0] > 1 else (o[:, :, :-1] == o[:, :, :1]).all()


@pytest.mark.parametrize("shape", [(0, 64, 2, D), (2, 0, 2, D), (2, 64, 0, D)])
def test_empty(shape):
    q = zeros(*shape)
    o = forward(CONFIG, q, q, q)
    assert (o.shape, o.dtype, o.device) == (q.shape, q.dtype, q.device)
    works()


def test_very_negative_scores():
    q = torch.full((1, 128, 1, D), 32.0, dtype=torch.float16, device="cuda")
    k = torch.full_like(q, -32)
    v = (
        (torch.arange(128, device="cuda") % 4 + 1)
        .half()[None, :, None, None]
        .expand(1, 128, 1, D)
        .contiguous()
    )
    torch.testing.assert_close(forward(CONFIG, q, k, v), torch.full_like(q, 2.5), atol=4e-3, rtol=0)
    k[:, 3] = -31.75  # the fourth key takes all the weight
    torch.testing.assert_close(forward(CONFIG, q, k, v), torch.full_like(q, 4.0), atol=4e-3, rtol=0)


# ---------------------------------------------------------------------- errors
def test_next_call_after_every_kind_of_error():
    q, k, v = inputs(DType.FP16, D, 128)
    for bad, error in (
        ((q[:, :100], k[:, :100], v[:, :100]), ValueError),
        ((q.float(), k, v), TypeError),
        ((q.cpu(), k, v), ValueError),
        ((q.clone().requires_grad_(), k, v), NotImplementedError),
    ):
        with pytest.raises(error):
            forward(CONFIG, *bad)
        works()


def test_illegal_launch_raises_and_does_no_harm():
    kernel = ForwardKernel(CONFIG)
    cuda.get_kernel(kernel, "cuda")
    x = zeros(64 * D).as_strided((1 << 16, 64, 1 << 16, D), (0, D, 0, 1))  # 2^32 blocks
    with pytest.raises(KernelLaunchError, match="cuda:0"):
        cuda.forward(kernel, x, x, x, x, None, 0.125)
    torch.cuda.synchronize()
    works()
    with pytest.raises(ValueError, match="thread blocks"):
        forward(CONFIG, x, x, x)
    works()


def test_configuration_that_does_not_fit():
    config = dataclasses.replace(CONFIG, d_head=128, B_r=512, B_c=512)
    q, k, v = generate_qkv(QKVConfig(1, 512, 2, 128, DType.FP16, device="cuda"))
    name = torch.cuda.get_device_name()
    with pytest.raises(InfeasibleConfigError, match=rf"{name}.*{config.smem_bytes()} bytes"):
        forward(config, q, k, v)
    works()


def test_devices_that_differ():
    q, k, v = inputs(DType.FP16, D, 128)
    with pytest.raises(ValueError, match=r"k on cpu"):
        forward(CONFIG, q, k.cpu(), v)
    check_fits_device(CONFIG, q.device)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_is_not_the_current_one():
    q, v = (x.to("cuda:1") for x in (zeros(1, 128, 2, D), zeros(1, 128, 2, D).fill_(3)))
    before = torch.cuda.memory_allocated(0)
    o = forward(CONFIG, q, q.clone(), v)
    assert (o == 3).all()
    assert o.device == q.device
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
    with pytest.raises(ValueError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        forward(CONFIG, q, q.to("cuda:0"), v)


# ---------------------------------------------------------------------- grad, memory, time
def test_inputs_that_require_grad():
    q, k, v = (x.clone().requires_grad_() for x in inputs(DType.FP16, D, 128))
    with pytest.raises(NotImplementedError, match="backward"):
        forward(CONFIG, q, k, v)
    expected = forward(CONFIG, *inputs(DType.FP16, D, 128))
    with torch.no_grad():
        assert torch.equal(forward(CONFIG, q, k, v), expected)
    with torch.inference_mode():
        assert torch.equal(forward(CONFIG, q, k, v), expected)


def test_memory_does_not_grow():
    kernels = len(cuda.registered_kernels())

    def call(i: int) -> None:
        q, k, v, _ = generate_qkvo(QKVConfig(1, 64 * (i % 7 + 1), 2, D, DType.FP16, device="cuda"))
        forward(CONFIG, q, k, v)

    for i in range(14):
        call(i)
    allocated = torch.cuda.memory_allocated()
    for i in range(280):
        call(i)
    assert torch.cuda.memory_allocated() == allocated
    assert len(cuda.registered_kernels()) <= kernels + 1
