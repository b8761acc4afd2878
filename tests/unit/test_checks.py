"""Every bad argument of ``forward``: the named exception, a message that helps, and a good call after it."""

from __future__ import annotations

import dataclasses
import functools
import re
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attention import attention, forward
from flash_attention.checks import configs
from flash_attention.checks import tensors as checks
from flash_attention.errors import DeviceNotSupportedError, InfeasibleConfigError
from flash_helpers.kernel_configs import (
    DType,
    FlashForwardKernelConfig,
    choose_hopper_kernel,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.device_facts import device_facts
from flash_helpers.messages import named_type

CONFIG = FlashForwardKernelConfig(DType.FP16, 64, 64, 32, 4, True, True, True, 0, 2, 2, False, True)
SHAPE = (2, 128, 3, 64)


def tensors(shape=SHAPE, dtype=torch.float16):
    return tuple(torch.full(shape, float(x), dtype=dtype) for x in (0, 0, 3))


@pytest.fixture(autouse=True)
def _next_call_works():
    yield
    q, k, v = tensors()
    assert (forward(CONFIG, q, k, v) == 3).all()


def refused(error: type[Exception], *words: str, q=None, k=None, v=None, o=None, config=CONFIG) -> None:
    """``forward`` with good tensors but the given ones raises exactly this type, with these words."""
    good = tensors()
    q, k, v = (g if x is None else x for x, g in zip((q, k, v), good, strict=True))
    with pytest.raises(error) as caught:
        forward(config, q, k, v, o)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


# ---------------------------------------------------------------------- configuration
@pytest.mark.parametrize("config", ["(FP16, 64, 64, 32, 4): async", None, {"B_r": 64}, [1]])
def test_not_a_configuration(config):
    refused(TypeError, "kernel_cfg", "FlashForwardKernelConfig", named_type(config), config=config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "fp16"), ("dtype", 5), ("B_r", 64.0), ("n_warps", "4"), ("async_copy", 1), ("B_c", True)],
)
def test_mistyped_field_is_named(name, value):
    config = dataclasses.replace(CONFIG, **{name: value})
    refused(TypeError, f"kernel_cfg.{name}", repr(value), config=config)


def test_equal_but_mistyped_configuration_is_refused_after_the_good_one():
    configs.forward_plan(CONFIG)
    mistyped = dataclasses.replace(CONFIG, async_copy=1)
    assert mistyped == CONFIG
    refused(TypeError, "async_copy", config=mistyped)


def test_configuration_that_no_gpu_can_run():
    refused(InfeasibleConfigError, "B_r", "24", config=dataclasses.replace(CONFIG, B_r=24))


# ---------------------------------------------------------------------- tensors
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_not_a_tensor(name):
    refused(TypeError, name, "list", "torch.Tensor", **{name: [1.0]})


def test_tensors_of_vmap():
    q = torch.zeros(3, 1, 64, 2, 64, dtype=torch.float16)
    for call in (attention, functools.partial(forward, CONFIG)):
        with pytest.raises(NotImplementedError, match=r"q is one of the tensors of torch\.vmap"):
            torch.vmap(call)(q, q, q)


def test_fake_tensors():
    """They have no memory that a kernel could be launched on, on whatever device they say they are."""
    fake = FakeTensorMode().from_tensor(tensors()[0])
    refused(TypeError, "q is a FakeTensor", "attention(…, config=kernel_cfg)", q=fake)


def test_sparse_and_nested():
    refused(TypeError, "k", "sparse", k=tensors()[1].to_sparse())
    nested = torch.nested.nested_tensor([torch.zeros(4, 3, 64, dtype=torch.float16)])
    refused(TypeError, "v", "nested", v=nested)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.float8_e4m3fn]
)
def test_dtype_of_all(dtype):
    q, k, v = (x.to(dtype) for x in tensors())
    refused(TypeError, "q", str(dtype), "torch.float16", "torch.bfloat16", q=q, k=k, v=v)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_mixed_dtypes_name_all_three(name):
    other = torch.zeros(SHAPE, dtype=torch.bfloat16)
    refused(
        TypeError, f"{name} torch.bfloat16", "torch.float16", f"{name}.to(torch.float16)", **{name: other}
    )


def test_autocast_does_not_hide_a_wrong_type():
    ones = torch.ones(SHAPE)
    with torch.autocast("cpu", torch.bfloat16):
        refused(TypeError, "q torch.float32", "v torch.bfloat16", q=ones, k=ones, v=ones.bfloat16())


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_devices_that_differ(name):
    refused(
        ValueError,
        f"{name} on meta",
        "on cpu",
        ".to(",
        **{name: torch.empty(SHAPE, dtype=torch.float16, device="meta")},
    )


def test_device_without_a_backend():
    x = torch.empty(SHAPE, dtype=torch.float16, device="meta")
    refused(ValueError, "meta", "cuda", "cpu", q=x, k=x, v=x)


@pytest.mark.parametrize(
    "shape", [(2, 64, 3, 64), (1, 128, 3, 64), (2, 128, 1, 64), (2, 128, 3, 128), (128, 3, 64)]
)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_shapes_that_differ(name, shape):
    refused(
        ValueError,
        f"{name} {shape}",
        str(SHAPE),
        "attention()",
        **{name: torch.zeros(shape, dtype=torch.float16)},
    )


def test_not_four_dimensions():
    q, k, v = tensors((128, 3, 64))
    refused(ValueError, "(batch, seq, heads, d_head)", "(128, 3, 64)", q=q, k=k, v=v)


def test_head_size():
    q, k, v = tensors((2, 128, 3, 128))
    refused(ValueError, "128", "d_head=64", q=q, k=k, v=v)


def test_head_sizes_that_differ():
    config = parse_kernel_name_into_config("(FP16, 192/128, 128, 64, 2wg): tma+kv_2+q_1+exact")
    q = torch.zeros(1, 128, 2, 192, dtype=torch.float16)
    refused(ValueError, "d_head_v=128", "attention(q, k, v, config=kernel_cfg)", q=q, k=q, v=q, config=config)
    refused(ValueError, "d_head_v=128", q=q, k=q, v=q[..., :128], config=config)
    assert attention(q, q, q[..., :128], config=config).shape == (1, 128, 2, 128)


@pytest.mark.parametrize(("seq_len", "nearest"), [(1, "0 and 64"), (96, "64 and 128"), (129, "128 and 192")])
def test_seq_len_names_the_nearest(seq_len, nearest):
    q, k, v = tensors((1, seq_len, 2, 64))
    refused(ValueError, str(seq_len), "B_r=64", "B_c=32", nearest, q=q, k=k, v=v)


def test_seq_len_multiple_of_both_blocks():
    config = dataclasses.replace(CONFIG, B_c=128)
    q, k, v = tensors((1, 192, 2, 64))
    refused(ValueError, "128 and 256", q=q, k=k, v=v, config=config)


# ---------------------------------------------------------------------- strides and alignment
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_last_stride(name):
    x = torch.zeros(2, 128, 64, 3, dtype=torch.float16).transpose(2, 3)
    refused(ValueError, name, "last stride is 3", f"{name}.contiguous()", **{name: x})


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_misaligned_address(name, offset):
    numel = torch.Size(SHAPE).numel()
    x = torch.zeros(numel + 16, dtype=torch.float16)[offset : offset + numel].view(SHAPE)
    refused(ValueError, name, f"{2 * offset} bytes past", "16", f"{name}.clone(", **{name: x})


def test_offset_of_eight_elements_is_aligned():
    numel = torch.Size(SHAPE).numel()
    x = torch.zeros(numel + 16, dtype=torch.float16)[8 : 8 + numel].view(SHAPE)
    assert (forward(CONFIG, x, x, tensors()[2]) == 3).all()


def test_misaligned_stride():
    x = torch.zeros(2, 128, 3, 68, dtype=torch.float16)[..., :64]
    refused(ValueError, "k", "dimension 1", "204", "408 bytes", k=x)


def test_strides_of_single_entries_do_not_matter():
    x = torch.zeros(128 * 64, dtype=torch.float16).as_strided((1, 128, 1, 64), (12345, 64, 3, 1))
    assert (forward(CONFIG, x, x, x.clone() + 3) == 3).all()


# ---------------------------------------------------------------------- grad
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_requires_grad(name):
    x = tensors()[2].requires_grad_()
    refused(NotImplementedError, name, "backward", f"{name}.detach()", **{name: x})
    q, k, v = ({"q": tensors()[0], "k": tensors()[1], "v": tensors()[2]} | {name: x}).values()
    with torch.no_grad():
        assert not forward(CONFIG, q, k, v).requires_grad
    with torch.inference_mode():
        assert (forward(CONFIG, tensors()[0], k, v) == 3).all()
    assert (forward(CONFIG, *(y.detach() for y in (tensors()[0], k, v))) == 3).all()


def test_parameters_are_tensors():
    q, k, v = (torch.nn.Parameter(x) for x in tensors())
    refused(NotImplementedError, "q, k, v", q=q, k=k, v=v)
    with torch.no_grad():
        assert (forward(CONFIG, q, k, v) == 3).all()


# ---------------------------------------------------------------------- output
def test_output_shape_dtype_device():
    refused(
        ValueError, "o has shape (2, 64, 3, 64)", str(SHAPE), o=torch.empty(2, 64, 3, 64, dtype=torch.float16)
    )
    refused(TypeError, "o is torch.float32", "torch.float16", o=torch.empty(SHAPE))
    refused(ValueError, "o is on meta", "cpu", o=torch.empty(SHAPE, dtype=torch.float16, device="meta"))
    refused(TypeError, "o is a str", o="out")


def test_output_strides_and_alignment():
    wide = torch.empty(2, 128, 64, 3, dtype=torch.float16).transpose(2, 3)
    refused(ValueError, "o's last stride", o=wide)
    refused(ValueError, "row of o", o=torch.empty(2, 128, 3, 68, dtype=torch.float16)[..., :64])
    refused(
        ValueError,
        "elements of o share memory",
        o=torch.empty(1, 128, 3, 64, dtype=torch.float16).expand(SHAPE),
    )


def test_output_that_is_an_input():
    for name, x in zip("qkv", tensors(), strict=True):
        refused(ValueError, f"o overlaps {name}", **{name: x}, o=x)


def test_output_that_shares_some_bytes():
    numel = torch.Size(SHAPE).numel()
    storage = torch.zeros(2 * numel, dtype=torch.float16)
    q, o = storage[:numel].view(SHAPE), storage[numel - 64 : 2 * numel - 64].view(SHAPE)
    refused(ValueError, "o overlaps q", q=q, o=o)
    behind = storage[numel:].view(SHAPE)
    assert forward(CONFIG, q, q.clone(), tensors()[2], behind) is behind


def test_output_between_the_inputs():
    packed = torch.zeros(2, 128, 4, 3, 64, dtype=torch.float16)  # q, k, v and o interleaved, no byte shared
    q, k, v, o = packed.unbind(2)
    v.fill_(3)
    assert forward(CONFIG, q, k, v, o) is o
    assert (o == 3).all()
    assert (v == 3).all()
    assert (k == 0).all()
    refused(
        ValueError,
        "o overlaps v",
        q=q,
        k=k,
        v=v,
        o=packed.as_strided(SHAPE, o.stride(), v.storage_offset() + 8),
    )


def test_output_that_requires_grad():
    o = torch.empty(SHAPE, dtype=torch.float16, requires_grad=True)
    refused(NotImplementedError, "o", o=o)


# ---------------------------------------------------------------------- limits of the launch and the device
def test_grid_limit():
    x = torch.zeros(64 * 64, dtype=torch.float16).as_strided((1 << 16, 64, 1 << 16, 64), (0, 64, 0, 1))
    refused(ValueError, "65536", "4294967296 thread blocks", "2147483647", q=x, k=x, v=x)


def test_more_than_65535_items_are_no_limit():
    x = torch.zeros(64 * 64, dtype=torch.float16).as_strided((1 << 16, 64, 1 << 14, 64), (0, 64, 0, 1))
    checks.check_forward(configs.forward_plan(CONFIG), x, x, x, None)


@pytest.fixture
def cuda_device(monkeypatch):
    """Pretends that device cuda:0 has the given facts."""

    def pretend(facts):
        monkeypatch.setattr(
            configs, "backend", lambda name: SimpleNamespace(device_facts_of=lambda device: facts)
        )
        return torch.device("cuda", 0)

    return pretend


def test_capability_below_8(cuda_device):
    device = cuda_device(dataclasses.replace(device_facts("A100"), name="Tesla T4", capability=(7, 5)))
    with pytest.raises(DeviceNotSupportedError, match=re.escape("Tesla T4") + r".* 7\.5.* 8\.0"):
        configs.check_fits_device(CONFIG, device)


def test_shared_memory(cuda_device):
    config = FlashForwardKernelConfig(DType.FP16, 128, 128, 256, 8, True, True, True, 0, 2, 2, False, True)
    device = cuda_device(device_facts("RTX 3090"))
    with pytest.raises(InfeasibleConfigError, match=rf"{config.smem_bytes()} bytes.*{99 * 1024}") as caught:
        configs.check_fits_device(config, device)
    assert "8.6" in str(caught.value)
    configs.check_fits_device(config, cuda_device(device_facts("A100")))


@pytest.mark.parametrize("name", ["A100", "RTX 4090"])
def test_configuration_of_another_architecture(cuda_device, name):
    config = choose_hopper_kernel(DType.FP16, 64, False, 512)[0].config
    major, minor = device_facts(name).capability
    with pytest.raises(InfeasibleConfigError, match=rf"{major}\.{minor}.* 9\.0 only.*another family"):
        configs.check_fits_device(config, cuda_device(device_facts(name)))
    configs.check_fits_device(config, cuda_device(device_facts("H100")))
