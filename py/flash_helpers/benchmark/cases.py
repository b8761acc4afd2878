"""Cases of the benchmarks of features and calls: what is computed, its inputs, its independent reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_helpers.benchmark.correctness import reference
from flash_helpers.benchmark.expected import gradients
from flash_helpers.benchmark.result_file import BOTH
from flash_helpers.flops import attention_flop, backward_flop, visible_pairs
from flash_helpers.kernels.dtype import DType
from flash_helpers.kernels.problem import BACKWARD, FORWARD, AttentionProblem, visible_limits

DTYPE = DType.BF16
D_HEAD = 128
NONE_OF = {"window": None, "window_right": 0, "d_head_v": None, "softcap": 0.0, "sinks": False}
"""Entries of a case that result files leave out, and when."""
CPU_SCALE = 16
"""What the lengths of all cases are divided by on the CPU, unless the caller says: a grid ends in minutes."""
SCALE_HELP = f"divides all lengths; 0: 1 on a GPU, {CPU_SCALE} on the CPU"
LABELS = {FORWARD: "", BACKWARD: ", gradients", BOTH: ", with gradients"}
"""What tables say of the pass that a case measures."""


@dataclass(frozen=True)
class Case:
    """One row of a benchmark.

    Attributes:
        feature: the part of the table that it belongs to.
        batch, seq_q, seq_k, heads, heads_kv: sizes; with ``lengths`` of the longest sequence.
        causal: the mask, aligned bottom-right.
        window: keys to the left that a query sees; None: all.
        lengths: of packed sequences.
        d_head: head size.
        window_right: keys to the right that it sees where there is a window; with 0 a window is causal.
        d_head_v: head size of V; None: ``d_head``.
        softcap: logits are capped; 0: they stay.
        sinks: each head has one more logit.
        dtype: element type.
        direction: what is timed: the forward pass, ``backward``, its gradients alone, or ``both``.
    """

    feature: str
    batch: int
    seq_q: int
    seq_k: int
    heads: int = 32
    heads_kv: int = 32
    causal: bool = False
    window: int | None = None
    lengths: tuple[int, ...] = ()
    d_head: int = D_HEAD
    window_right: int = 0
    d_head_v: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    dtype: DType = DTYPE
    direction: str = FORWARD

    def __post_init__(self) -> None:
        if self.direction not in LABELS:
            raise ValueError(f"direction is {self.direction!r}; allowed: {', '.join(LABELS)}")
        if self.direction != FORWARD and (self.softcap or self.sinks):
            raise ValueError(
                f"direction is {self.direction!r} of a case with a soft cap or sinks, whose gradients have "
                "no reference; give no softcap and no sinks"
            )

    def scaled(self, scale: int) -> Case:
        """The same with its lengths divided, and never 0: odd ones stay odd."""

        def part(n: int) -> int:
            return n if scale == 1 else max(1, n // scale) | n % 2

        lengths = tuple(map(part, self.lengths))
        return replace(
            self, seq_q=max(lengths, default=part(self.seq_q)), seq_k=max(lengths, default=part(self.seq_k)),
            window=part(self.window) if self.window else self.window,
            window_right=part(self.window_right) if self.window_right else 0, lengths=lengths,
        )  # fmt: skip

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Keys to the left and right of a query that the window lets it see; None: all."""
        return (self.window, None if self.window is None else self.window_right)

    @property
    def value_size(self) -> int:
        """Columns of V and O."""
        return self.d_head_v or self.d_head

    def label(self) -> str:
        """For tables: ``b2 s8192 h32/8 window 512``."""
        heads = f"h{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads else "")
        seq = f"s{self.seq_q}" + (f"x{self.seq_k}" if self.seq_k != self.seq_q else "")
        sizes = f"{self.d_head}" + (f"/{self.d_head_v}" if self.d_head_v else "")
        size = f" d{sizes}" if sizes != f"{D_HEAD}" else ""
        mask = " causal" if self.causal else ""
        if self.window is not None:
            mask = f" window {self.window}" + (f" + {self.window_right}" if self.window_right else "")
        if self.lengths:
            seq = f"{len(self.lengths)} sequences, {sum(self.lengths)} tokens"
        more = (f" softcap {self.softcap:g}" if self.softcap else "") + (" sinks" if self.sinks else "")
        more += f" {self.dtype.name.lower()}" if self.dtype is not DTYPE else ""
        return f"b{self.batch} {seq} {heads}{size}{mask}{more}{LABELS[self.direction]}"

    def to_json(self) -> dict[str, Any]:
        """The problem in the words of result files; what there is none of is left out. Rows say the pass."""
        sizes = {
            "dtype": self.dtype.name, "batch": self.batch, "n_heads": self.heads,
            "n_heads_kv": self.heads_kv, "seq_len_q": self.seq_q, "seq_len_k": self.seq_k,
            "d_head": self.d_head, "causal": self.causal,
        }  # fmt: skip
        further = {name: getattr(self, name) for name, none in NONE_OF.items() if getattr(self, name) != none}
        return sizes | further | ({"lengths": list(self.lengths)} if self.lengths else {})

    @classmethod
    def from_json(cls, feature: str, values: dict[str, Any], direction: str = FORWARD) -> Case:
        """The inverse of ``to_json``. Raises one of ``CONTENT_ERRORS`` where the values are no case."""
        return cls(
            feature, values["batch"], values["seq_len_q"], values["seq_len_k"], values["n_heads"],
            values["n_heads_kv"], values["causal"], lengths=tuple(values.get("lengths", ())),
            d_head=values["d_head"], dtype=DType.from_string(values["dtype"]), direction=direction,
            **{name: values[name] for name in NONE_OF if name in values},
        )  # fmt: skip

    def flop(self) -> int:
        """FLOP of the visible pairs, of all that is timed."""
        sizes = [(n, n) for n in self.lengths] or [(self.seq_q, self.seq_k)] * self.batch
        pairs = sum(visible_pairs(q, k, self.causal, self.limits) for q, k in sizes)
        # Two products, of head sizes that may differ.
        forward = attention_flop(1, self.heads, self.d_head + self.value_size, pairs) // 2
        gradients = 0 if self.direction == FORWARD else backward_flop(forward)
        return gradients + (0 if self.direction == BACKWARD else forward)

    def cache_bytes(self) -> int:
        """Bytes of K and V, which a single query reads once."""
        return self.batch * self.seq_k * self.heads_kv * (self.d_head + self.value_size) * self.dtype.itemsize

    def problem(self) -> AttentionProblem:
        """The forward pass as ``select`` sees it."""
        left, right = visible_limits(self.causal, self.limits, self.seq_q, self.seq_k)
        return AttentionProblem(
            self.dtype, self.batch, self.seq_q, self.seq_k, self.heads, self.heads_kv,
            self.d_head, self.value_size, left, right,
            softcap=self.softcap > 0, sinks=self.sinks, varlen=bool(self.lengths),
            lse=self.direction != FORWARD,
        )  # fmt: skip


def scaled_cases(cases: Iterable[Case], scale: int) -> list[Case]:
    """Cases with their lengths divided; those that become equal are one."""
    return list(dict.fromkeys(case.scaled(scale) for case in cases))


def scale_on(device: torch.device, scale: int) -> int:
    """What lengths are divided by: what the caller says, and where that is 0, what suits the device."""
    return scale or (CPU_SCALE if device.type == "cpu" else 1)


@dataclass(frozen=True)
class Inputs:
    """Tensors of a case: q, k, v (batch, seq, heads, d) or packed (total, heads, d).

    Attributes:
        ends: (sequences + 1,) int32, where packed sequences begin and the last one ends; None: not packed.
        sinks: (heads,) of the type of q; None: there are none.
        dout: gradient of the output, of cases that are differentiated; None: of others.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ends: Tensor | None
    sinks: Tensor | None = None
    dout: Tensor | None = None


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Standard normal tensors, the same for equal cases."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = case.dtype.to_torch_dtype()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    def rows(seq: int) -> tuple[int, ...]:
        return (sum(case.lengths),) if case.lengths else (case.batch, seq)

    ends = None
    if case.lengths:
        ends = torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32, device=device)
    q = normal(*rows(case.seq_q), case.heads, case.d_head)
    k = normal(*rows(case.seq_k), case.heads_kv, case.d_head)
    v = normal(*rows(case.seq_k), case.heads_kv, case.value_size)
    sinks = normal(case.heads) if case.sinks else None
    dout = normal(*rows(case.seq_q), case.heads, case.value_size) if case.direction != FORWARD else None
    return Inputs(q, k, v, ends, sinks, dout)


def expected_output(case: Case, x: Inputs) -> Tensor | tuple[Tensor, ...]:
    """What is right, by ``correctness.reference``: float32, of the shape of q; or the three gradients."""
    if x.dout is not None:
        return _expected_gradients(case, x, x.dout)
    options: dict[str, Any] = {"causal": case.causal, "window": case.limits}
    options |= {"softcap": case.softcap, "sinks": x.sinks}
    if not case.lengths:
        return reference(x.q, x.k, x.v, **options)
    return torch.cat([reference(q, k, v, **options)[0] for q, k, v in _sequences(case, x.q, x.k, x.v)])


def _expected_gradients(case: Case, x: Inputs, dout: Tensor) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"causal": case.causal, "window": case.limits}
    if not case.lengths:
        return gradients(x.q, x.k, x.v, dout, **options)
    parts = [gradients(q, k, v, do, **options) for q, k, v, do in _sequences(case, x.q, x.k, x.v, dout)]
    return tuple(torch.cat([part[0] for part in found]) for found in zip(*parts, strict=True))


def _sequences(case: Case, *packed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The parts of packed tensors, each sequence as a batch of one."""
    for one in zip(*(t.split(case.lengths) for t in packed), strict=True):
        yield tuple(part[None] for part in one)
