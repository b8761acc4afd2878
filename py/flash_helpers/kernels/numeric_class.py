"""What the bits of a query's row depend on beside its own numbers, read off a configuration without a GPU.

Two kernels of one numeric class do the same float operations, in the same order, for a row: its output and
its LSE have the same bits from both, however many queries, heads or batch items stand beside it. What is
*not* part of a class changes no bit: how many rows a block has, warps, stages, where Q is, in which order
blocks run, pages, packing. Why that is so stands in DESIGN.md ("One arithmetic"); tests compare bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from flash_helpers.kernels.dtype import DType

INVARIANT = "invariant"
"""The value of ``numerics`` that asks for one numeric class."""
FAST = "fast"
"""The value of ``numerics`` that asks for nothing, as None does."""


@dataclass(frozen=True, order=True)
class NumericClass:
    """The order and the kind of the float operations of a row.

    Tiles of keys lie on a grid that begins at key 0, and a row takes them from the last to the first; a tile
    that hides all of its keys from the row leaves the row's state as it is.

    Attributes:
        products: the instruction of both products, whose order of additions is its own. Steps of 16 go up
            along the head and along the keys of a tile.
        dtype: of Q, K, V and P.
        key_tile: keys of a tile. Maximum, rescale and sum of a row take one tile at a time.
        reference: against which value of the row exponentials are taken.
        exponent: ``fused``: exp2(s * factor - reference * factor) in one multiply-add; ``scaled``:
            exp2((s * scale - reference) * log2e).
        row_sums: ``lanes``: float32, a lane's columns first; ``tensor``: of the rounded P, by the products'
            instruction; ``torch``: as PyTorch sums a row.
        head_parts: parts of the head whose scores are added up: 1, or 2 of paired warps.
        softcap: the form of tanh: ``element``: by the score alone; ``warp``: by the other scores of its warp.
        chunk_tiles: tiles of a chunk of keys: at each multiple a row begins anew, and chunks are joined from
            the last to the first; 0: all keys are one chunk.
    """

    products: str
    dtype: DType
    key_tile: int
    reference: str
    exponent: str
    row_sums: str
    head_parts: int = 1
    softcap: str = "element"
    chunk_tiles: int = 0

    @property
    def row_obstacle(self) -> str | None:
        """Why the bits of a row depend on the rows beside it, or None: they do not."""
        if self.reference in ("lagged", "anchored"):
            return (
                f"its softmax_reference {self.reference.upper()} moves for the rows of a warp together: the "
                "bits of a row depend on its neighbours"
            )
        return None

    def softcap_obstacle(self) -> str | None:
        """The same of soft-capped scores."""
        if self.softcap == "warp":
            return "it takes the form of tanh that the largest score of a warp asks for: bits depend on it"
        return None

    def difference(self, other: NumericClass) -> str:
        """What this class has that the other has not, each beside what the other has; empty: they are one."""
        pairs = zip(self._words().values(), other._words().values(), strict=True)
        return "; ".join(f"{own}, not {theirs}" for own, theirs in pairs if own != theirs)

    def _words(self) -> dict[str, str]:
        """What each field says."""
        parts = "the whole head" if self.head_parts == 1 else f"{self.head_parts} parts of the head"
        return {
            "products": self.products,
            "dtype": self.dtype.name.lower(),
            "key_tile": f"{self.key_tile} keys a tile",
            "reference": f"{self.reference} reference",
            "exponent": f"{self.exponent} exponents",
            "row_sums": f"sums by {self.row_sums}",
            "head_parts": f"scores of {parts}",
            "softcap": f"tanh by {self.softcap}",
            "chunk_tiles": f"chunks of {self.chunk_tiles} tiles" if self.chunk_tiles else "one chunk",
        }

    def __str__(self) -> str:
        words = self._words()
        words["key_tile"] += " from the last to the first"
        if self.head_parts == 1:
            del words["head_parts"]
        return ", ".join(words.values())
