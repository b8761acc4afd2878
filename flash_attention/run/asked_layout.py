"""The layout that ``explain_choice`` is asked about: that of the call which takes these arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flash_attention.checks.options import checked_flag
from flash_attention.layouts import DENSE, Cached, Layout, Packed, PackedCached


class AskedRows(NamedTuple):
    """Arguments by which rows form sequences, as ``attention_varlen`` and ``attention_cached`` take them."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    n_splits: int | None = None
    validate: bool = False

    def layout(self) -> Layout:
        """Packed rows where there are offsets, a cache where there are counts alone, else batch items.

        Raises:
            ValueError: an argument without another that it needs.
        """
        given = {name: x for name, x in self._asdict().items() if x is not None and name != "validate"}
        if self.cu_seqlens_q is not None:
            return self._packed(given)
        self._refuse_beside(given, ("seqused_k", "block_table"), "cu_seqlens_q", "packed queries have it")
        if self.seqused_k is not None:
            return Cached(self.seqused_k, self.block_table, self.validate)
        self._refuse_beside(given, (), "seqused_k", "it says how many keys each batch item has")
        if checked_flag("validate", self.validate):
            raise ValueError(
                "validate is True, and no offsets, counts or pages are given, whose numbers it reads: leave "
                "it away"
            )
        return DENSE

    def _packed(self, given: dict[str, Any]) -> Layout:
        assert self.cu_seqlens_q is not None
        if self.max_seqlen_q is None or self.max_seqlen_k is None:
            name = "max_seqlen_q" if self.max_seqlen_q is None else "max_seqlen_k"
            raise ValueError(f"cu_seqlens_q is given without {name}: pass the length of the longest sequence")
        longest = self.max_seqlen_q, self.max_seqlen_k
        counted = given.keys() & {"seqused_q", "seqused_k", "block_table", "n_splits"}
        if self.cu_seqlens_k is not None and not counted:
            return Packed(self.cu_seqlens_q, self.cu_seqlens_k, *longest, self.validate)
        counts = self.seqused_q, self.seqused_k, self.block_table
        ends = self.cu_seqlens_q, self.cu_seqlens_k
        return PackedCached(*ends, *counts, *longest, self.n_splits, self.validate)

    @staticmethod
    def _refuse_beside(given: dict[str, Any], taken: tuple[str, ...], missing: str, why: str) -> None:
        for name in given:
            if name not in taken:
                raise ValueError(f"{name} is given without {missing}: {why}; pass both, or neither")


def has_gradients(layout: Layout) -> bool:
    """Whether a call of this layout may be differentiated."""
    return not (layout.paged or isinstance(layout, PackedCached))
