"""Against which value of a row the softmax takes its exponentials: a choice of both families."""

from __future__ import annotations

from enum import IntEnum


class SoftmaxReference(IntEnum):
    """Against which value of a row exponentials are taken.

    Attributes:
        EXACT: the row's maximum up to and with the tile.
        EXACT_SKIP_RESCALE: the same; O is rescaled only when a row of the warp grew.
        LAGGED: the maximum before the tile; growth beyond 2^8 is adopted. Hopper family: growth is examined
            after the exponentials, and beyond 2^100 the tile is recomputed exactly. Ampere family: it is
            examined before them.
        ANCHORED: the maximum of the first tiles, for good: no maxima afterwards. Sums that have left bf16's
            safe range are seen in the end, and the block is computed again, exactly. Ampere family, BF16.
        LAGGED_BY_ROW: as LAGGED, but each row is treated by itself, so that its bits do not depend on the
            rows beside it. Hopper family.
    """

    EXACT = 0
    EXACT_SKIP_RESCALE = 1
    LAGGED = 2
    ANCHORED = 3
    LAGGED_BY_ROW = 4

    def to_cpp_str(self) -> str:
        """The enumerator as C++ source text."""
        return f"SoftmaxReference::{self.name}"


SOFTMAX_WORDS = {
    SoftmaxReference.EXACT: "exact",
    SoftmaxReference.EXACT_SKIP_RESCALE: "skip_rescale",
    SoftmaxReference.LAGGED: "lagged",
    SoftmaxReference.ANCHORED: "anchored",
    SoftmaxReference.LAGGED_BY_ROW: "lagged_by_row",
}
"""The words of ``short_form()``, shared with the parsers."""
