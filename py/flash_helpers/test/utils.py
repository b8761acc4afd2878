"""What tests and benchmarks share: inputs, PyTorch's eager attention, error measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.kernel import ForwardConfig
from flash_helpers.test.reference import reference

__all__ = [
    "DISTRIBUTIONS",
    "ErrorStats",
    "Evaluation",
    "QKVConfig",
    "error_stats",
    "evaluate_kernel",
    "generate_qkv",
    "generate_qkvo",
    "py_flash_attention",
    "ramp",
    "reference",
]

DISTRIBUTIONS = ("randn", "peaked", "constant", "ramp")
RAMP_FACTORS = (5, 7, 11)  # of q, k and v


@dataclass(frozen=True)
class QKVConfig:
    """Shape and contents of one set of inputs.

    Attributes:
        batch: batch items.
        seq_len: queries; and keys, unless ``seq_len_k`` says otherwise.
        n_heads: query heads; and kv heads, unless ``n_heads_kv`` says otherwise.
        d_head: head size; and v's, unless ``d_head_v`` says otherwise.
        dtype: element type.
        device: where the tensors live.
        seed: of the random kinds; equal configurations give equal tensors.
        distribution: ``randn``; ``peaked``: q and k times 4, so that few keys take nearly all weight;
            ``constant``: ones; ``ramp``: a fixed pattern that needs no random generator, see ``ramp``.
    """

    batch: int
    seq_len: int
    n_heads: int
    d_head: int
    dtype: DType
    device: str = "cpu"
    seed: int = 0
    seq_len_k: int | None = None
    n_heads_kv: int | None = None
    d_head_v: int | None = None
    distribution: str = "randn"

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of q, k and v."""
        keys = self.seq_len if self.seq_len_k is None else self.seq_len_k
        heads_kv = self.n_heads if self.n_heads_kv is None else self.n_heads_kv
        d_v = self.d_head if self.d_head_v is None else self.d_head_v
        return (
            (self.batch, self.seq_len, self.n_heads, self.d_head),
            (self.batch, keys, heads_kv, self.d_head),
            (self.batch, keys, heads_kv, d_v),
        )


def ramp(
    shape: tuple[int, ...], factor: int, dtype: torch.dtype = torch.float16, device: str = "cpu"
) -> Tensor:
    """``((factor * n) mod 257 - 128) / 64`` over the flat index n: within [-2, 2], exact in fp16 and bf16."""
    n = torch.arange(math.prod(shape), device=device)
    return ((factor * n % 257 - 128).double() / 64).to(dtype).view(shape)


def generate_qkv(config: QKVConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous q, k and v.

    Raises:
        ValueError: unknown distribution; the message lists the known ones.
    """
    shapes, dtype = config.shapes(), config.dtype.to_torch_dtype()
    if config.distribution == "ramp":
        q, k, v = (ramp(s, a, dtype, config.device) for s, a in zip(shapes, RAMP_FACTORS, strict=True))
    elif config.distribution == "constant":
        q, k, v = (torch.ones(s, dtype=dtype, device=config.device) for s in shapes)
    elif config.distribution in DISTRIBUTIONS:
        generator = torch.Generator(config.device).manual_seed(config.seed)
        q, k, v = (torch.randn(s, generator=generator, device=config.device) for s in shapes)
        if config.distribution == "peaked":
            q, k = 4 * q, 4 * k
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    else:
        raise ValueError(f"unknown distribution {config.distribution!r}; known: {', '.join(DISTRIBUTIONS)}")
    return q, k, v


def generate_qkvo(config: QKVConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v as ``generate_qkv`` gives them, and an o full of NaN, which shows what a kernel leaves out."""
    q, k, v = generate_qkv(config)
    o = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=q.dtype, device=q.device)
    return q, k, v, o


def py_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    upcast: bool = False,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """PyTorch's eager attention, the yardstick of a tolerance.

    Args:
        q: (batch, seq_len_q, n_heads, d_head).
        k: (batch, seq_len_k, n_heads_kv, d_head).
        v: (batch, seq_len_k, n_heads_kv, d_head_v).
        upcast: compute and return float32; else everything, the softmax's result too, is in q's type.
        causal: bottom-right aligned.
        softmax_scale: None: d_head ** -0.5.

    Returns:
        (batch, seq_len_q, n_heads, d_head_v).
    """
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2).transpose(1, 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q.transpose(1, 2) @ k.mT) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(scores.shape[-1] - scores.shape[-2]), -math.inf)
    return (torch.softmax(scores, -1) @ v).transpose(1, 2)


@dataclass(frozen=True)
class ErrorStats:
    """How far a tensor is from what it should be.

    Attributes:
        max_abs: largest absolute difference.
        mean_abs: mean absolute difference.
        max_rel: largest difference relative to the expected value, where that is not 0.
        rel_frobenius: Frobenius norm of the difference over that of the expected tensor.
    """

    max_abs: float
    mean_abs: float
    max_rel: float
    rel_frobenius: float


def error_stats(actual: Tensor, expected: Tensor) -> ErrorStats:
    """Compares in float64; equal infinities differ by 0, NaN anywhere makes the figures NaN.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"cannot compare shape {tuple(actual.shape)} with {tuple(expected.shape)}")
    if not actual.numel():
        return ErrorStats(0.0, 0.0, 0.0, 0.0)
    a, e = actual.double(), expected.double()
    difference = torch.where(a == e, 0.0, (a - e).abs())
    relative = torch.where(e == 0, 0.0, difference / e.abs().clamp_min(torch.finfo(torch.float64).tiny))
    norm = e.norm().item()
    return ErrorStats(
        max_abs=difference.max().item(),
        mean_abs=difference.mean().item(),
        max_rel=relative.max().item(),
        rel_frobenius=difference.norm().item() / norm if norm else difference.norm().item(),
    )


@dataclass(frozen=True)
class Evaluation:
    """One run of one kernel, judged.

    Attributes:
        error: of the kernel's output against the float64 reference.
        pytorch_error: of PyTorch's eager attention in the same precision, against the same.
        milliseconds: the kernel's own time.
    """

    error: ErrorStats
    pytorch_error: ErrorStats
    milliseconds: float

    @property
    def right(self) -> bool:
        """At most twice PyTorch's error (and 1e-5, for inputs on which PyTorch happens to be exact)."""
        return self.error.max_abs <= 2 * self.pytorch_error.max_abs + 1e-5


def evaluate_kernel(config: ForwardConfig, inputs: QKVConfig) -> Evaluation:
    """Runs a configuration through ``flash_attention.forward_timed`` and compares.

    Raises:
        what ``forward_timed`` raises.
    """
    import flash_attention

    q, k, v, o = generate_qkvo(inputs)
    o, milliseconds = flash_attention.forward_timed(config, q, k, v, o)
    expected, _ = reference(q, k, v)
    return Evaluation(
        error_stats(o, expected), error_stats(py_flash_attention(q, k, v), expected), milliseconds
    )
