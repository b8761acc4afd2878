"""How the rows of q, k and v form sequences: the layout of a call, with its own checks.

A layout is made of the caller's arguments between v and the options, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flash_attention.checks import layouts as checks
from flash_attention.checks.options import checked_flag, checked_splits

Sizes = tuple[int, int, int]  # batch items, most queries of one, most keys of one


BATCHES = "(batch, seq, heads, d)"
PACKED = "(total, heads, d)"


class Dense(NamedTuple):
    """Batch items of one length: q, k and v are (batch, seq, heads, d)."""

    @property
    def axes(self) -> str:
        """The axes of q, for messages."""
        return BATCHES

    @property
    def paged(self) -> bool:
        """Whether the first axis of k and v counts pages."""
        return False

    @property
    def axes_kv(self) -> str:
        """The axes of k and v, for messages."""
        return self.axes

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        return q.shape[0], q.shape[1], k.shape[1]

    def check_numbers(self) -> None:
        """Refuses what is wrong with the arguments that are no tensors."""

    def check(self, q: Tensor, k: Tensor) -> None:
        """Refuses what is wrong with the layout, as far as no number of a tensor is read."""

    def check_values(self, q: Tensor, k: Tensor) -> None:
        """Reads the tensors of the layout where the caller wants it, or where nobody waits for that."""

    def tensors(self) -> dict[str, Tensor | None]:
        """The tensors of the layout by the names of the arguments."""
        return {}

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Dense:
        """The same with other tensors, in the order of ``tensors``."""
        return self

    def slots(self) -> tuple[Any, ...]:
        """What a remembered call compares, in the order of ``launch_cache.repeat``."""
        return ()


class Packed(NamedTuple):
    """Sequences one behind the other: q, k and v are (total, heads, d). See ``attention_varlen``."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    validate: bool = False

    @property
    def axes(self) -> str:
        return PACKED

    @property
    def axes_kv(self) -> str:
        return PACKED

    @property
    def paged(self) -> bool:
        return False

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        return self.cu_seqlens_q.numel() - 1, self.max_seqlen_q, self.max_seqlen_k

    def check_numbers(self) -> None:
        checks.check_max_seqlen("max_seqlen_q", self.max_seqlen_q)
        checks.check_max_seqlen("max_seqlen_k", self.max_seqlen_k)
        checked_flag("validate", self.validate)

    def check(self, q: Tensor, k: Tensor) -> None:
        checks.check_packing(q, k, *self[:4])

    def check_values(self, q: Tensor, k: Tensor) -> None:
        if checked_flag("validate", self.validate) or not q.is_cuda:
            for name, offsets, x, longest in (
                ("q", self.cu_seqlens_q, q, self.max_seqlen_q),
                ("k", self.cu_seqlens_k, k, self.max_seqlen_k),
            ):
                names = f"cu_seqlens_{name}", f"max_seqlen_{name}"
                checks.check_offset_values(names[0], offsets, x.shape[0], names[1], longest)

    def tensors(self) -> dict[str, Tensor | None]:
        return {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Packed:
        cu_seqlens_q, cu_seqlens_k = tensors
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        return self._replace(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)

    def slots(self) -> tuple[Any, ...]:
        return self.cu_seqlens_q, self.cu_seqlens_k, None, None, None, self.max_seqlen_q, self.max_seqlen_k


class Cached(NamedTuple):
    """Batch items with as many keys as a tensor says, in one piece or in pages. See ``attention_cached``."""

    seqused_k: Tensor
    block_table: Tensor | None = None
    validate: bool = False

    @property
    def axes(self) -> str:
        return BATCHES

    @property
    def axes_kv(self) -> str:
        return BATCHES

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        capacity = k.shape[1]
        if self.block_table is not None:
            capacity *= self.block_table.shape[1] if k.shape[0] else 0
        return q.shape[0], q.shape[1], capacity

    def check_numbers(self) -> None:
        checked_flag("validate", self.validate)

    def check(self, q: Tensor, k: Tensor) -> None:
        checks.check_seqused("seqused_k", self.seqused_k, q)
        if self.block_table is not None:
            checks.check_block_table(self.block_table, q)

    def check_values(self, q: Tensor, k: Tensor) -> None:
        if checked_flag("validate", self.validate) or not q.is_cuda:
            checks.check_counts("seqused_k", self.seqused_k)
            if self.block_table is not None:
                checks.check_pages(self.block_table, self.seqused_k, k)

    def tensors(self) -> dict[str, Tensor | None]:
        return {"seqused_k": self.seqused_k, "block_table": self.block_table}

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Cached:
        seqused_k, block_table = tensors
        assert seqused_k is not None
        return self._replace(seqused_k=seqused_k, block_table=block_table)

    def slots(self) -> tuple[Any, ...]:
        return None, None, self.seqused_k, self.block_table, None


class PackedCached(NamedTuple):
    """Packed queries of which, or of whose keys, a tensor says how many count. See ``attention_varlen``.

    Keys are packed (``cu_seqlens_k``), a cache of one piece a sequence, or pages.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    n_splits: int | None = None
    validate: bool = False

    @property
    def axes(self) -> str:
        return PACKED

    @property
    def axes_kv(self) -> str:
        return BATCHES if self.cu_seqlens_k is None else PACKED

    @property
    def paged(self) -> bool:
        return self.block_table is not None

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        return self.cu_seqlens_q.numel() - 1, self.max_seqlen_q, min(self.max_seqlen_k, self.capacity(k))

    def capacity(self, k: Tensor) -> int:
        """Keys of a sequence for which there is room."""
        if self.cu_seqlens_k is not None:
            return self.max_seqlen_k
        if self.block_table is None:
            return k.shape[1]
        return k.shape[1] * self.block_table.shape[1] if k.shape[0] else 0

    def check_numbers(self) -> None:
        checks.check_max_seqlen("max_seqlen_q", self.max_seqlen_q)
        checks.check_max_seqlen("max_seqlen_k", self.max_seqlen_k)
        checked_splits(self.n_splits)
        checked_flag("validate", self.validate)

    def check(self, q: Tensor, k: Tensor) -> None:
        checks.check_packed_cache(q, k, *self[:7])
        checked_splits(self.n_splits)

    def check_values(self, q: Tensor, k: Tensor) -> None:
        if checked_flag("validate", self.validate) or not q.is_cuda:
            checks.check_packed_cache_values(q, k, *self[:7])

    def tensors(self) -> dict[str, Tensor | None]:
        return {name: getattr(self, name) for name in self._fields[:5]}

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> PackedCached:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table = tensors
        assert cu_seqlens_q is not None
        return self._replace(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            block_table=block_table,
        )

    def slots(self) -> tuple[Any, ...]:
        tensors = self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k, self.block_table, self.seqused_q
        return (*tensors, self.max_seqlen_q, self.max_seqlen_k)


Layout = Dense | Packed | Cached | PackedCached
DENSE = Dense()
# The function and the operator that take each.
NAMES: dict[type[Layout], str] = {
    Dense: "attention",
    Packed: "attention_varlen",
    Cached: "attention_cached",
    PackedCached: "attention_packed_cached",
}
