"""Choices on a device, with a CUDA backend acted by the CPU's: padding, alignment, building, caching."""

from __future__ import annotations

import math
from importlib import import_module

import pytest
import torch

from flash_attention import attention, attention_varlen, choosing, explain_choice, last_kernel, prepare
from flash_attention import attention_checks as checks
from flash_attention.attention import _fill_without_keys, _run_cuda
from flash_attention.backends import cpu
from flash_attention.errors import NoKernelError
from flash_attention.problem import AttentionProblem
from flash_attention.select import select
from flash_helpers.kernel_configs import DType, device_facts
from flash_helpers.test.utils import QKVConfig, generate_qkv, ramp, reference

H100 = device_facts("H100")
CUDA = torch.device("cuda", 0)
PROBLEM = AttentionProblem(DType.FP16, 2, 100, 90, 4, 2, 64, 64)


class ActedCuda:
    """The functions of the CUDA backend that choosing calls; kernels compute on the CPU."""

    def __init__(self) -> None:
        self.built: set = set()
        self.loaded: list = []
        self.launches: list = []

    def device_facts_of(self, device):
        return H100

    def load_kernel(self, kernel, target):
        return kernel if kernel in self.built else None

    def get_kernel(self, kernel, device):
        self.loaded.append(kernel)

    def forward(self, kernel, q, k, v, o, lse, softmax_scale):
        for x in (q, k, v, o):
            assert x.shape[3] == kernel.config.d_head
            assert x.stride(3) == 1
            assert x.data_ptr() % 16 == 0
            assert all(n == 1 or s % 8 == 0 for n, s in zip(x.shape[:3], x.stride()[:3], strict=True))
        assert softmax_scale >= 0
        self.launches.append(kernel)
        cpu.forward(kernel, q, k, v, o, lse, softmax_scale)


@pytest.fixture
def cuda(monkeypatch):
    acted = ActedCuda()
    acted.build = lambda kernels, targets: acted.built.update(kernels)
    monkeypatch.setattr(choosing, "backend", lambda name: acted)
    module = import_module(
        "flash_attention.attention"
    )  # the package's attribute of this name is the function
    monkeypatch.setattr(module, "backend_of", lambda name: acted)
    monkeypatch.setattr(choosing, "build_kernels", acted.build)
    choosing.choose.cache_clear()
    yield acted
    choosing.choose.cache_clear()


@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (40, 40), (72, 72), (128, 8), (8, 128)])
@pytest.mark.parametrize("scale", [0.1, 0.0, -0.1])
def test_tensors_are_made_to_fit_the_kernel(cuda, d, d_v, scale):
    q, k, v = generate_qkv(QKVConfig(2, 50, 4, d, DType.FP16, seq_len_k=70, n_heads_kv=2, d_head_v=d_v))
    k = k.transpose(2, 3).contiguous().transpose(2, 3)  # last stride is not 1
    v = torch.cat((v.new_zeros(1), v.flatten()))[1:].view(v.shape)  # not at a multiple of 16 bytes
    problem = AttentionProblem(DType.FP16, 2, 50, 70, 4, 2, d, d_v, right=0)
    choice = choosing.choose(problem, CUDA, None)
    out = torch.full((2, 50, 4, d_v), math.nan, dtype=torch.float16)
    lse = torch.empty(2, 4, 50)
    _run_cuda(choice, q, k, v, out, lse, scale)
    expected, expected_lse = reference(q, k, v, causal=True, softmax_scale=scale)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=2e-6)


def test_fitting_tensors_are_not_copied(cuda):
    q, k, v = generate_qkv(QKVConfig(2, 50, 4, 64, DType.FP16))
    seen = []
    cuda.forward = lambda kernel, *tensors_and_scale: seen.extend(tensors_and_scale)
    out = torch.empty_like(q)
    packed = torch.stack((q, k, v), 2).unbind(2)
    _run_cuda(choosing.choose(PROBLEM, CUDA, None), *packed, out, None, 0.1)
    assert [x.data_ptr() for x in seen[:4]] == [x.data_ptr() for x in (*packed, out)]


def test_no_keys():
    out, lse = torch.empty(1, 3, 2, 8), torch.empty(1, 2, 3)
    _fill_without_keys(out, lse, None)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    _fill_without_keys(out, lse, torch.tensor([1.0, 2.0]))
    assert lse[0].tolist() == [[1.0] * 3, [2.0] * 3]


def test_built_kernels_are_preferred_until_prepared(cuda):
    best = select(PROBLEM, H100).kernel
    near = select(PROBLEM, H100).rejected[0].kernel
    cuda.built.add(near)
    assert choosing.choose(PROBLEM, CUDA, None).kernel == near
    (choice,) = prepare([PROBLEM], CUDA)
    assert choice.kernel == best
    assert cuda.loaded == [best]
    assert choosing.choose(PROBLEM, CUDA, None).kernel == best


def test_prepare_builds_each_kernel_once(cuda):
    builds = []
    choosing.build_kernels = lambda kernels, targets: (
        builds.append((list(kernels), targets)),
        cuda.built.update(kernels),
    )
    causal = AttentionProblem(DType.FP16, 2, 100, 90, 4, 2, 64, 64, right=0)
    prepare([PROBLEM, PROBLEM, causal], CUDA)
    prepare([PROBLEM], CUDA)
    ((kernels, targets),) = builds
    assert len(kernels) == 2
    assert targets == [90]


def test_prepare_on_the_cpu_builds_nothing():
    (choice,) = prepare([PROBLEM], "cpu")
    assert "CPU" in choice.reason


def test_grid_limit_of_the_chosen_kernel(cuda):
    huge = AttentionProblem(DType.FP16, 1 << 16, 64, 64, 1 << 16, 1 << 16, 64, 64)
    with pytest.raises(ValueError, match="thread blocks"):
        choosing.choose(huge, CUDA, None)


def test_choices_are_remembered_by_shape(monkeypatch):
    calls = []
    real = checks.check_inputs
    monkeypatch.setattr(checks, "check_inputs", lambda *a: (calls.append(a), real(*a)))
    shape = (1, 23, 2, 24)
    for _ in range(3):
        q, k, v = (ramp(shape, a) for a in (5, 7, 11))
        attention(q, k, v, softmax_scale=0.1)
    assert len(calls) == 1
    attention(q, k, v, causal=True)
    assert len(calls) == 2


def test_remembered_choices_are_bounded(monkeypatch):
    monkeypatch.setattr(choosing, "CHOICES_KEPT", 8)
    for n in range(1, 30):
        q = torch.zeros(1, n, 1, 8, dtype=torch.float16)
        attention(q, q, q)
        assert len(choosing._plans) <= 8


def test_sinks_are_checked_on_every_call():
    q = torch.zeros(1, 5, 2, 8, dtype=torch.float16)
    attention(q, q, q, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="sinks"):
        attention(q, q, q, sinks=torch.zeros(3))


def test_last_kernel_of_packed_sequences():
    q = torch.zeros(5, 2, 8, dtype=torch.float16)
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    attention(*(torch.zeros(1, 5, 2, 16, dtype=torch.float16),) * 3)
    attention_varlen(q, q, q, offsets, offsets, 5, 5, causal=True)
    assert last_kernel().config.d_head == 8
    assert last_kernel().traits.causal


def test_explained_for_a_device_that_is_not_there():
    q, k, v = generate_qkv(QKVConfig(1, 100, 2, 64, DType.FP16))
    with pytest.raises(NoKernelError, match="softcap"):
        explain_choice(q, k, v, softcap=3.0, facts=H100)
    choice = explain_choice(q, k, v, facts=H100)
    assert (
        explain_choice(q, k, v, facts=H100, config=choice.rejected[0].kernel.config).kernel
        == choice.rejected[0].kernel
    )
