"""What is to be computed: the sizes, the inputs, and whether they fit the memory. Imports torch when used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flash_helpers.flops import attention_bytes, attention_flop, backward_flop, visible_pairs
from flash_helpers.host_memory import available_memory
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.families import direction_of
from flash_helpers.kernels.problem import BACKWARD, FORWARD

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flash_helpers.kernels.kernel import KernelConfig

REFERENCE_BYTES = 1 << 30  # working memory of the float32 reference, see benchmark/correctness.py


class NotEnoughMemoryError(ValueError):
    """The problem does not fit the device's free memory; nothing was allocated."""


@dataclass(frozen=True, order=True)
class Problem:
    """One size to measure. Tensors are (batch, seq_len, heads, d_head), standard normal.

    Attributes:
        dtype: element type of the four tensors.
        batch, heads, d_head: as named.
        seq_len: queries.
        causal: bottom-right aligned causal mask.
        heads_kv: heads of K and V; 0: as many as ``heads``.
        seq_len_k: keys; 0: as many as queries.
        direction: what is computed: ``forward``, or ``backward``, the gradients of the same.
    """

    dtype: DType
    batch: int
    heads: int
    seq_len: int
    d_head: int
    causal: bool = False
    heads_kv: int = 0
    seq_len_k: int = 0
    direction: str = FORWARD

    def __post_init__(self) -> None:
        if self.direction not in (FORWARD, BACKWARD):
            raise ValueError(f"direction is {self.direction!r}; allowed: {FORWARD!r}, {BACKWARD!r}")
        for name in ("batch", "heads", "seq_len", "d_head"):
            _check_count(name, getattr(self, name), 1)
        for name in ("heads_kv", "seq_len_k"):
            _check_count(name, getattr(self, name), 0)
        if type(self.causal) is not bool:
            raise ValueError(f"causal is {self.causal!r}; allowed: True, False")
        object.__setattr__(self, "dtype", DType(self.dtype))
        object.__setattr__(self, "heads_kv", self.heads_kv or self.heads)
        object.__setattr__(self, "seq_len_k", self.seq_len_k or self.seq_len)
        if self.heads % self.heads_kv:
            raise ValueError(f"heads is {self.heads}, no multiple of heads_kv {self.heads_kv}")

    def fits(self, config: KernelConfig) -> bool:
        """Whether a kernel is made for this pass over tensors of this type and head size."""
        if direction_of(config).name != self.direction:
            return False
        return (config.dtype, config.d_head, config.d_head_v) == (self.dtype, self.d_head, self.d_head)

    def pairs(self) -> int:
        """Visible (query, key) pairs of one head."""
        return visible_pairs(self.seq_len, self.seq_len_k, self.causal)

    def flop(self) -> int:
        """FLOP of one pass by the formula of ``flops``."""
        forward = attention_flop(self.batch, self.heads, self.d_head, self.pairs())
        return forward if self.direction == FORWARD else backward_flop(forward)

    def min_bytes(self) -> int:
        """Bytes of Q, K, V and O together; with gradients, theirs too."""
        sizes = (self.batch, self.heads, self.heads_kv, self.seq_len, self.seq_len_k, self.d_head)
        tensors = attention_bytes(*sizes, itemsize=self.dtype.itemsize)
        return tensors if self.direction == FORWARD else 2 * tensors

    def label(self) -> str:
        """A short text for tables, e.g. ``fp16 b16 h16 s4096 d128 causal``."""
        heads = f"h{self.heads}" if self.heads_kv == self.heads else f"h{self.heads}/{self.heads_kv}"
        seq = f"s{self.seq_len}" if self.seq_len_k == self.seq_len else f"s{self.seq_len}x{self.seq_len_k}"
        mask = " causal" if self.causal else ""
        of = "" if self.direction == FORWARD else f"{self.direction} "
        return f"{of}{self.dtype.name.lower()} b{self.batch} {heads} {seq} d{self.d_head}{mask}"

    def to_json(self) -> dict[str, Any]:
        """Plain values; the dtype by name, the direction where it is not ``forward``."""
        values = {**asdict(self), "dtype": self.dtype.name}
        if self.direction == FORWARD:
            del values["direction"]
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Problem:
        """The inverse of ``to_json``."""
        return cls(**{**values, "dtype": DType.from_string(values["dtype"])})

    def bytes_wanted(self, outputs: int) -> int:
        """Bytes a benchmark of ``outputs`` implementations holds at most at one time.

        The inputs, one output each, a float32 reference, and the reference's working memory.
        """
        output = self.batch * self.seq_len * self.heads * self.d_head
        if self.direction != FORWARD:  # each holds the output and its gradient, and writes three gradients
            output += 2 * output + 2 * self.batch * self.seq_len_k * self.heads_kv * self.d_head
        return self.min_bytes() + output * (self.dtype.itemsize * outputs + 3 * 4) + REFERENCE_BYTES

    def check_memory(self, device: torch.device, outputs: int = 1, free: int | None = None) -> None:
        """Refuses a problem before anything of it is allocated.

        Args:
            device: where the tensors are to live.
            outputs: implementations that hold an output at the same time.
            free: free bytes; None: ask the device.

        Raises:
            NotEnoughMemoryError: it does not fit; the message names the bytes wanted and free.
        """
        if free is None:
            free = free_bytes(device)
        wanted = self.bytes_wanted(outputs)
        if wanted > free:
            raise NotEnoughMemoryError(
                f"{self.label()} wants {wanted:,} bytes on {device}, of which {self.min_bytes():,} "
                f"for Q, K, V and O; {free:,} are free. Take a smaller batch, seq_len or head count"
            )

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Q (batch, seq_len, heads, d_head), K and V (batch, seq_len_k, heads_kv, d_head)."""
        import torch

        generator = torch.Generator(device=device).manual_seed(seed)
        dtype = self.dtype.to_torch_dtype()
        q_shape = (self.batch, self.seq_len, self.heads, self.d_head)
        kv_shape = (self.batch, self.seq_len_k, self.heads_kv, self.d_head)
        shapes = (q_shape, kv_shape, kv_shape)
        q, k, v = (torch.randn(s, generator=generator, device=device, dtype=dtype) for s in shapes)
        return q, k, v

    def output_gradient(self, device: torch.device, seed: int = 1) -> Tensor:
        """The gradient of O, (batch, seq_len, heads, d_head), that a backward pass begins with."""
        import torch

        generator = torch.Generator(device=device).manual_seed(seed)
        shape = (self.batch, self.seq_len, self.heads, self.d_head)
        return torch.randn(shape, generator=generator, device=device, dtype=self.dtype.to_torch_dtype())


def _check_count(name: str, value: object, least: int) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}; it must be an integer")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def free_bytes(device: torch.device) -> int:
    """Memory that can be allocated on ``device`` now, bytes."""
    if device.type == "cuda":
        import torch

        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    return available_memory()


def grid(
    dtypes: Iterable[DType],
    seq_lens: Sequence[int],
    d_heads: Sequence[int],
    causals: Iterable[bool] = (False,),
    batch: int = 0,
    heads: int = 0,
    tokens: int = 16384,
    width: int = 2048,
    direction: str = FORWARD,
    seq_lens_k: Sequence[int] = (),
) -> list[Problem]:
    """Every combination once; a batch or head count of 0 keeps the work alike over the grid.

    Then batch = tokens / seq_len and heads = width / d_head, at least 1.

    Args:
        seq_lens_k: numbers of keys; empty: as many keys as queries.

    Raises:
        ValueError: a length or head size below 1; a batch or head count below 0.
    """
    for name, size in (("batch", batch), ("heads", heads)):
        if size < 0:
            raise ValueError(
                f"{name} is {size}; it must be at least 1, or 0: as many as keep the work alike over sizes"
            )
    for name, sizes in (("seq_len", seq_lens), ("d_head", d_heads), ("seq_len_k", seq_lens_k)):
        if wrong := [size for size in sizes if size < 1]:
            raise ValueError(f"{name} is {wrong[0]}; it must be at least 1")
    problems = (
        Problem(
            dtype,
            batch or max(1, tokens // s),
            heads or max(1, width // d),
            s,
            d,
            causal,
            seq_len_k=keys,
            direction=direction,
        )
        for dtype in dtypes
        for d in d_heads
        for causal in causals
        for s in seq_lens
        for keys in seq_lens_k or (0,)
    )
    return list(dict.fromkeys(problems))
