"""C63: dropout on the CPU, forward and backward, against P that is dropped in float64, element by element.

On a GPU: tests/gpu/test_dropped_weights.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attention
from flash_attention import sdpa
from flash_attention.cached import attention_cached
from flash_attention.errors import NoKernelError
from flash_attention.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
from flash_attention.mods.philox import random_words
from flash_attention.options import Options
from flash_helpers.kernels.device_facts import device_facts
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.problem import AttentionProblem
from flash_helpers.mods.philox import threshold
from flash_helpers.select.select import select

P = 0.3
SEED = torch.tensor(20261128)


def inputs(
    seq_q: int = 70, seq_k: int = 90, heads: int = 4, heads_kv: int = 2, batch: int = 2
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(batch, seq_q, heads, 32), *[(batch, seq_k, heads_kv, 32)] * 2]
    return [torch.randn(*shape, generator=generator).half() for shape in shapes]


def kept(q: Tensor, k: Tensor, p: float = P, seed: Tensor = SEED, first: int = 0) -> Tensor:
    """(batch, heads, queries, keys): 0, or 1 / (1 - p)."""
    b, h = (
        torch.arange(first, first + q.shape[0])[:, None, None, None],
        torch.arange(q.shape[2])[:, None, None],
    )
    words = random_words(seed, b, h, range(q.shape[1]), range(k.shape[1]))
    return (words >= threshold(p)).double() / (1 - p)


def expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: float = P,
    causal: bool = False,
    score_mod: Any = None,
    sinks: Tensor | None = None,
    seed: Tensor = SEED,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Output and LSE in float64, with a graph."""
    group = q.shape[2] // k.shape[2]
    wide = [x.double().transpose(1, 2) for x in (q, k, v)]
    scores = wide[0] @ wide[1].repeat_interleave(group, 1).mT / math.sqrt(q.shape[3])
    n_q, n_k = scores.shape[-2:]
    if score_mod is not None:
        places = (
            torch.arange(q.shape[0])[:, None, None, None],
            torch.arange(q.shape[2])[:, None, None],
            torch.arange(n_q)[:, None],
            torch.arange(n_k),
        )
        scores = score_mod(scores, *places)
    if causal:
        scores = scores.masked_fill(torch.ones(n_q, n_k).triu(n_k - n_q + 1) > 0, -math.inf)
    lse = scores.logsumexp(-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    weights = torch.exp(scores - lse[..., None]) * kept(q, k, p, seed, first)
    return (weights @ wide[2].repeat_interleave(group, 1)).transpose(1, 2), lse


def close(found: Tensor, right: Tensor, tolerance: float = 4e-3) -> None:
    torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"score_mod": lambda s, b, h, q, k: s * 0.5 + 0.01 * (k - q)},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
]


@pytest.mark.parametrize("p", [0.1, P, 0.97])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "".join(options) or "plain")
def test_c63_outputs_and_gradients(options: dict[str, Any], p: float) -> None:
    tensors = [x.requires_grad_() for x in inputs()]
    out, lse = flash_attention.attention(*tensors, dropout_p=p, dropout_seed=SEED, return_lse=True, **options)
    right, right_lse = expected(*tensors, p, **options)
    scale = max(1.0, float(right.detach().abs().max()))
    close(out / scale, right / scale)
    close(lse, right_lse, 1e-4)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), tensors, (dout, dlse))
    wanted = torch.autograd.grad((right, right_lse), tensors, (dout.double(), dlse.double()))
    for x, y in zip(found, wanted, strict=True):
        close(x / y.abs().max(), (y / y.abs().max()).double(), 1e-2)


def test_c63_tiles_do_not_decide_what_is_dropped() -> None:
    """The same places of v are 0 in the output whatever the blocks of keys are: v names its key."""
    q, k, _ = inputs(70, 64, 2, 2)
    v = torch.eye(64).half()[None, :, None].expand(2, 64, 2, 64).contiguous()
    q, k = torch.nn.functional.pad(q, (0, 32)), torch.nn.functional.pad(k, (0, 32))
    from flash_helpers.kernel_configs import FlashForwardKernelConfig

    seen = []
    for B_c in (32, 64, 128):
        config = FlashForwardKernelConfig(
            DType.FP16, 64, 64, B_c, 4, False, False, False, 0, 0, 0, False, True
        )
        out = flash_attention.attention(q, k, v, dropout_p=P, dropout_seed=SEED, config=config)
        seen.append(out.transpose(1, 2) != 0)  # (batch, heads, queries, keys)
    assert all(torch.equal(one, kept(q, k) > 0) for one in seen)


def test_large_calls_are_computed_in_parts() -> None:
    q, k, v = inputs(2100, 300, 4, 2, 3)
    found = flash_attention.attention(q, k, v, dropout_p=P, dropout_seed=SEED)
    close(found, expected(q, k, v)[0], 6e-3)


def test_c63_packed_sequences_and_caches_count_their_own_places() -> None:
    q, k, v = inputs(40, 50)
    whole = flash_attention.attention(q, k, v, dropout_p=P, dropout_seed=SEED)
    ends_q, ends_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (40, 50))
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    packed = flash_attention.attention_varlen(*rows, ends_q, ends_k, 40, 50, dropout_p=P, dropout_seed=SEED)
    assert torch.equal(packed.view_as(whole), whole)
    used = torch.tensor([50, 31], dtype=torch.int32)
    cached = attention_cached(q, k, v, used, dropout_p=P, dropout_seed=SEED)
    assert torch.equal(cached[:1], whole[:1])
    close(cached[1:], expected(q[1:], k[1:, :31], v[1:, :31], first=1)[0])


# ---------------------------------------------------------------------- seeds
def test_c63_pytorchs_generator_gives_the_seed() -> None:
    q, k, v = inputs()
    torch.manual_seed(5)
    first = flash_attention.attention(q, k, v, dropout_p=P)
    second = flash_attention.attention(q, k, v, dropout_p=P)
    torch.manual_seed(5)
    assert torch.equal(flash_attention.attention(q, k, v, dropout_p=P), first)
    assert torch.equal(flash_attention.attention(q, k, v, dropout_p=P), second)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    flash_attention.attention(q, k, v, dropout_p=0.0)
    flash_attention.attention(q, k, v, dropout_p=P, dropout_seed=SEED)
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn


def test_checkpoints_drop_the_same_again() -> None:
    from torch.utils.checkpoint import checkpoint

    gradients = []
    for again in (False, True):
        tensors = [x.requires_grad_() for x in inputs()]
        torch.manual_seed(8)
        call = lambda *x: flash_attention.attention(*x, dropout_p=P)  # noqa: E731
        out: Tensor = checkpoint(call, *tensors, use_reentrant=False) if again else call(*tensors)
        gradients.append(torch.autograd.grad(out.float().square().sum(), tensors))
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_the_mean_of_many_calls_is_the_output_without_dropout() -> None:
    q, k, v = inputs(16, 64, 2, 2, 1)
    whole = flash_attention.attention(q, k, v).double()
    n = 200
    outs = torch.stack([flash_attention.attention(q, k, v, dropout_p=0.5).double() for _ in range(n)])
    error = (outs.mean(0) - whole).abs() / (outs.std(0) / math.sqrt(n))
    assert float(error.max()) < 6
    assert float(error.square().mean()) < 1.3


# ---------------------------------------------------------------------- by other names
def test_the_names_of_pytorch_and_flash_attn() -> None:
    q, k, v = inputs(50, 50)
    ends = torch.tensor([0, 50, 100], dtype=torch.int32)
    calls = {
        "sdpa": lambda: sdpa(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=P, enable_gqa=True).transpose(
            1, 2
        ),
        "func": lambda: flash_attn_func(q, k, v, P),
        "varlen": lambda: flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in (q, k, v)), ends, ends, 50, 50, P
        ).view(q.shape),
    }
    for call in calls.values():
        torch.manual_seed(3)
        seed = torch.empty((), dtype=torch.int64).random_()
        torch.manual_seed(3)
        close(call(), expected(q, k, v, seed=seed)[0])


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan, "0.1", True, torch.ones(2)])
def test_probabilities_are_checked(p: Any) -> None:
    q, k, v = inputs()
    for call in (flash_attention.attention, flash_attn_func):
        with pytest.raises((TypeError, ValueError), match=r"^dropout_p is"):
            call(q, k, v, dropout_p=p)


def test_what_is_refused_is_named() -> None:
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0.3, and return_attn_probs is True"):
        flash_attn_func(q, k, v, P, return_attn_probs=True)
    for seed in (3, torch.tensor(3.0), torch.tensor([3])):
        with pytest.raises(TypeError, match=r"^dropout_seed is .* \(\) int64"):
            flash_attention.attention(q, k, v, dropout_p=P, dropout_seed=seed)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=r"^dropout_p is 0.3; weights are dropped at once"):
        flash_attention.attention(*(x.to("meta") for x in (q, k, v)), dropout_p=P)
    compiled = torch.compile(
        lambda q, k, v: flash_attention.attention(q, k, v, dropout_p=P), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"dropout_p is 0.3; weights are dropped at once"):
        compiled(q, k, v)


@pytest.mark.parametrize("device", ["A100", "H100"])
def test_kernels_drop_weights_but_over_a_cache(device: str) -> None:
    """What they compute: tests/gpu/test_dropped_weights.py."""
    problem = AttentionProblem(DType.FP16, 1, 512, 512, 4, 4, 64, 64, dropout=True)
    for asked in (
        problem,
        problem.backward(),
        replace(problem, seq_len_q=1),
        replace(problem, varlen=True, cached=True, paged=True),
    ):
        kernel = select(asked, device_facts(device)).kernel
        assert kernel.mod is not None
        assert kernel.mod.dropped is not None
    assert "dropout" in problem.label().split()
    planned = replace(problem, varlen=True, cached=True, planned=True)
    with pytest.raises(NoKernelError, match=r"drop no weights \(dropout_p\) for packed queries over a cache"):
        select(planned, device_facts(device))
    assert Options().dropout_p == 0.0


def test_c63_a_seed_that_is_counted_up_before_the_backward_pass() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    seed = SEED.clone()
    out = flash_attention.attention(q, k, v, dropout_p=P, dropout_seed=seed)
    right = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    seed.add_(1)
    found = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
