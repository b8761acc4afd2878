"""The compile-time part of a problem: which features a kernel of a direction is compiled for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from flash_helpers.kernels.cpp_struct import designated_initializer


class Traits:
    """What the traits of every direction can say. Each class is a frozen, ordered dataclass of flags."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def short_form(self) -> str:
        """The features that are on, joined by ``+``; the empty string for the plain kernel."""
        return "+".join(f.name for f in fields(self) if getattr(self, f.name))

    def to_cpp_struct(self) -> str:
        """The value as a C++ designated initializer."""
        return designated_initializer(self)


@dataclass(frozen=True, order=True)
class ForwardTraits(Traits):
    """What a forward kernel must be able to do. A feature that is off costs nothing.

    The C++ struct of the same name is generated from this one.

    Attributes:
        causal: key j is visible to query i when ``j <= i + (seq_len_k - seq_len_q)``.
        window: only keys near that diagonal are visible; bounds to the left and the right are given at run
            time. A causal window is one whose right bound is 0.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: a logit a head takes part in the softmax and has no value.
        varlen: sequences of different lengths, packed one after the other.
        split: the keys of a query block are shared by several thread blocks, and combined.
        padded_head: tensors have fewer columns than the kernel's ``d_head``.
        paged: rows of K and V lie in pages, which a table names.
        planned: blocks find their work on the device, from the lengths of packed sequences: each has its own
            number of parts of the keys, and the heads of a group are rows of one head. ``varlen`` is on.
    """

    causal: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    varlen: bool = False
    split: bool = False
    padded_head: bool = False
    paged: bool = False
    planned: bool = False

    def planned_obstacle(self) -> str | None:
        """Why no kernel has these features together, or None."""
        if self.planned and not self.varlen:
            return "planned: the work follows from the lengths of sequences; it needs varlen"
        if self.planned and self.split:
            return (
                "planned: it cuts keys into parts itself, each sequence's into its own number; turn split off"
            )
        return None


@dataclass(frozen=True, order=True)
class BackwardTraits(Traits):
    """What a backward kernel must be able to do, see ``ForwardTraits``.

    Sinks need no trait: they act through the LSE alone.

    Attributes:
        causal: as of the forward pass.
        window: likewise.
        softcap: likewise.
        varlen: likewise.
        padded_head: likewise.
        float_key_gradients: dK and dV are float32, not rounded, for sums of several calls; not with varlen.
        float_query_gradients: likewise dQ; where another kernel than the one of dK and dV leaves it.
    """

    causal: bool = False
    window: bool = False
    softcap: bool = False
    varlen: bool = False
    padded_head: bool = False
    float_key_gradients: bool = False
    float_query_gradients: bool = False

    def float_obstacle(self) -> str | None:
        """Why no kernel has these features together, or None."""
        for name in ("float_key_gradients", "float_query_gradients"):
            if getattr(self, name) and self.varlen:
                return (
                    f"{name}: rows of no sequence are cleared as elements of 16 bits; turn varlen off, or "
                    "the float32 gradients"
                )
        return None


PLAIN = ForwardTraits()
"""The forward kernel without features."""
PLAIN_BACKWARD = BackwardTraits()
"""The backward kernel without features."""
