"""Which problems count as alike: one bucket is tuned once, at one size."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.problem import FORWARD
from flash_helpers.problem import Problem

MAX_LENGTH = 1 << 40  # beyond any tensor
HEADS_PER_SM = (1 / 16, 8.0)  # below, the SMs are nearly empty; above, they are full with every tile


@dataclass(frozen=True, order=True)
class Bucket:
    """Problems for which the same configuration is expected to be the fastest.

    Attributes:
        dtype, d_head, causal: as in the problem.
        heads_per_sm: batch · heads over the device's SMs, to the nearest power of two from 1/16 to 8: how
            many thread blocks there are beside those that the length gives.
        queries, keys: lengths, to the nearest power of two.
        direction: what the kernels compute; rows and tables that do not say it are of ``forward``.
    """

    dtype: DType
    d_head: int
    causal: bool
    heads_per_sm: float
    queries: int
    keys: int
    direction: str = FORWARD

    def __post_init__(self) -> None:
        for name in ("d_head", "queries", "keys"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_LENGTH:
                raise ValueError(f"{name} of a bucket is {value!r}; allowed: an integer from 1 to 2^40")
        load = self.heads_per_sm
        if isinstance(load, bool) or not isinstance(load, (int, float)) or not 0 < load <= MAX_LENGTH:
            raise ValueError(f"heads_per_sm of a bucket is {load!r}; allowed: a number above 0")
        if not isinstance(self.dtype, DType) or type(self.causal) is not bool:
            raise ValueError(f"dtype of a bucket is {self.dtype!r}, causal {self.causal!r}: of other types")
        if not isinstance(self.direction, str) or not self.direction.isidentifier():
            raise ValueError(
                f"direction of a bucket is {self.direction!r}; allowed: a name such as {FORWARD!r}"
            )

    @classmethod
    def of(
        cls,
        dtype: DType,
        d_head: int,
        causal: bool,
        batch_heads: int,
        seq_len_q: int,
        seq_len_k: int,
        sm_count: int,
        direction: str = FORWARD,
    ) -> Bucket:
        """The bucket of a problem with ``batch_heads`` = batch · heads on a device of ``sm_count`` SMs.

        Lengths and counts of 0 fall into the lowest bucket.
        """
        low, high = HEADS_PER_SM
        load = min(high, max(low, _power_of_two(batch_heads / sm_count)))
        queries, keys = (max(1, int(_power_of_two(n))) for n in (seq_len_q, seq_len_k))
        return cls(DType(dtype), d_head, causal, load, queries, keys, direction)

    @classmethod
    def of_problem(cls, problem: Problem, sm_count: int) -> Bucket:
        """The bucket of a problem on a device of ``sm_count`` SMs."""
        return cls.of(
            problem.dtype, problem.d_head, problem.causal, problem.batch * problem.heads,
            problem.seq_len, problem.seq_len_k, sm_count, problem.direction,
        )  # fmt: skip

    def label(self) -> str:
        """A short text, e.g. ``fp16 d128 causal, 4096 queries, 2 heads per SM``."""
        mask = " causal" if self.causal else ""
        keys = "" if self.keys == self.queries else f" x {self.keys} keys"
        load = f"{self.heads_per_sm:g}" if self.heads_per_sm >= 1 else f"1/{1 / self.heads_per_sm:g}"
        lengths = f"{self.queries} queries{keys}"
        of = "" if self.direction == FORWARD else f"{self.direction} "
        return f"{of}{self.dtype.name.lower()} d{self.d_head}{mask}, {lengths}, {load} heads per SM"

    def to_json(self) -> dict[str, Any]:
        """Plain values; the dtype by name."""
        return {**asdict(self), "dtype": self.dtype.name}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Bucket:
        """The inverse of ``to_json``."""
        return cls(**{**values, "dtype": DType.from_string(values["dtype"])})


def _power_of_two(value: float) -> float:
    """The power of two nearest to ``value`` on a logarithmic scale; 0 for 0."""
    return 2.0 ** round(math.log2(value)) if value > 0 else 0.0
