"""``explain_choice``, ``attention`` and ``last_kernel`` say the same; what is said can be asked for."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flash_attention import (
    PyTorchAttention,
    attention,
    attention_varlen,
    explain_choice,
    last_kernel,
    prepare,
)
from flash_attention.backends import cpu_fused
from flash_attention.cached import attention_cached
from flash_attention.errors import InfeasibleConfigError
from flash_attention.run import availability, choices, cuda_choice
from flash_helpers import generation
from flash_helpers.kernel_configs import (
    DType,
    ForwardKernel,
    choose_hopper_kernel,
    device_facts,
    get_kernels_to_build,
    parse_kernel_name_into_config,
)
from flash_helpers.kernels.problem import AttentionProblem

H100 = device_facts("H100")
CONFIG = next(c for c in get_kernels_to_build() if (c.dtype, c.d_head) == (DType.FP16, 128))


def tensors(batch: int, seq_q: int, seq_k: int, heads: int, heads_kv: int, d: int, d_v: int = 0) -> list:
    torch.manual_seed(0)
    shapes = ((seq_q, heads, d), (seq_k, heads_kv, d), (seq_k, heads_kv, d_v or d))
    return [torch.randn(batch, *shape).half() for shape in shapes]


# ---------------------------------------------------------------------- a named configuration
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("seq_len_q", [1, 16])
def test_a_named_configuration_takes_all_keys_in_one_go(monkeypatch, batch, seq_len_q):
    """As ``attention`` runs it; it is never cut into parts, not even for a GPU that is not there."""
    q = torch.empty(batch, seq_len_q, 8, 128, dtype=torch.float16, device="meta")
    k = torch.empty(batch, 16384, 8, 128, dtype=torch.float16, device="meta")
    assert explain_choice(q, k, k, facts=H100).n_splits > 1
    explained = explain_choice(q, k, k, facts=H100, config=CONFIG)
    assert (explained.kernel, explained.n_splits) == (ForwardKernel(CONFIG), 1)
    # What attention(config=...) asks for on such a GPU.
    problem = AttentionProblem(DType.FP16, batch, seq_len_q, 16384, 8, 8, 128, 128)
    acted = type("Acted", (), {"device_facts_of": lambda self, device: H100})()
    monkeypatch.setattr(cuda_choice, "backend", lambda name: acted)
    monkeypatch.setattr(availability, "backend", lambda name: pytest.fail("nothing is looked for"))
    generation.begin()
    assert choices.choose(problem, torch.device("cuda", 0), CONFIG) == explained
    generation.begin()


def test_a_named_configuration_that_cannot_run_is_refused_for_a_gpu_that_is_not_there():
    q = torch.empty(1, 64, 8, 128, dtype=torch.bfloat16, device="meta")
    hopper, _ = choose_hopper_kernel(DType.BF16, 128, False, 64)
    with pytest.raises(InfeasibleConfigError, match="cannot run on NVIDIA A100-SXM4-80GB"):
        explain_choice(q, q, q, facts=device_facts("A100"), config=hopper.config)


# ---------------------------------------------------------------------- the CPU
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("d_v", [0, 8, 256])
@pytest.mark.parametrize("d", [8, 40, 64, 80, 96, 128, 160, 192, 200, 256])
def test_what_is_chosen_on_the_cpu_can_be_named(d, d_v, lse):
    q, k, v = tensors(1, 20, 30, 4, 2, d, d_v)
    options = {"causal": True, "return_lse": lse}
    choice = explain_choice(q, k, v, **options)
    found = attention(q, k, v, **options)
    assert last_kernel() == choice.kernel
    named = attention(q, k, v, **options, config=choice.kernel.config)
    assert last_kernel() == ForwardKernel(choice.kernel.config, choice.kernel.traits)
    again = parse_kernel_name_into_config(choice.kernel.config.short_form())
    assert again == choice.kernel.config
    found, named = (x if lse else (x,) for x in (found, named))
    for x, y in zip(found, named, strict=True):
        assert torch.allclose(x.float(), y.float(), atol=2e-3, rtol=2e-3)
        assert choice.fused or torch.equal(x, y)


def test_last_kernel_says_when_pytorchs_attention_ran():
    q, k, v = tensors(2, 20, 30, 4, 2, 64)
    attention(q, k, v)
    ran = last_kernel()
    assert isinstance(ran, PyTorchAttention)
    assert ran == explain_choice(q, k, v).kernel
    assert ran.short_form() == "PyTorch attention on the CPU"
    steps = ForwardKernel(ran.config, ran.traits)
    assert ran != steps
    assert len({ran, steps}) == 2
    attention(q, k, v, softcap=3.0)
    assert not isinstance(last_kernel(), PyTorchAttention)
    assert last_kernel() == explain_choice(q, k, v, softcap=3.0).kernel
    attention(q, k, v, config=ran.config)
    assert last_kernel() == steps == explain_choice(q, k, v, config=ran.config).kernel


def test_last_kernel_says_when_pytorchs_attention_was_left(monkeypatch):
    """Where no batch item has finite scores, and where PyTorch refuses, the steps of the kernel are taken."""
    q, k, v = tensors(2, 20, 30, 4, 2, 64)
    q[1, 3] = math.inf
    attention(q, k, v)
    assert isinstance(last_kernel(), PyTorchAttention)  # for the first item
    q[0, 3] = math.inf
    attention(q, k, v)
    assert type(last_kernel()) is ForwardKernel

    def refuses(*args, **options):
        raise RuntimeError("pack_vnni2 is only supported when avx512 is supported")

    monkeypatch.setattr(cpu_fused, "_fused", refuses)
    q, k, v = tensors(2, 20, 30, 4, 2, 64)
    attention(q, k, v)
    assert type(last_kernel()) is ForwardKernel


def test_last_kernel_of_packed_sequences_and_caches_on_the_cpu():
    q, k, v = tensors(2, 20, 30, 4, 2, 64)
    attention_cached(q, k, v, torch.tensor([30, 7], dtype=torch.int32))
    assert isinstance(last_kernel(), PyTorchAttention)
    attention_cached(q, k, v, torch.tensor([30, 7], dtype=torch.int32), softcap=2.0)
    assert type(last_kernel()) is ForwardKernel
    ends = torch.tensor([0, 5, 20], dtype=torch.int32)
    packed = (q[0], k[0, :20], v[0, :20], ends, ends, 15, 15)
    attention_varlen(*packed)
    assert isinstance(last_kernel(), PyTorchAttention)
    attention_varlen(*packed, return_lse=True)
    assert type(last_kernel()) is ForwardKernel


def test_a_call_that_needs_no_kernel_leaves_the_latest_one():
    q, k, v = tensors(1, 20, 30, 4, 2, 64)
    attention(q, k, v, softcap=2.0)
    latest = last_kernel()
    attention(q[:, :0], k, v)
    assert last_kernel() is latest


def test_a_grid_of_calls_on_the_cpu():
    for d, heads_kv, seq_q, causal, lse, softcap in itertools.product(
        (64, 72), (1, 4), (1, 33), (False, True), (False, True), (0.0, 5.0)
    ):
        q, k, v = tensors(2, seq_q, 40, 4, heads_kv, d)
        options = {"causal": causal, "return_lse": lse, "softcap": softcap}
        attention(q, k, v, **options)
        before = explain_choice(q, k, v, **options)
        assert last_kernel() == before.kernel
        prepare([])
        attention(q, k, v, **options)
        assert last_kernel() == before.kernel == explain_choice(q, k, v, **options).kernel
