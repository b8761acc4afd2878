"""Where the next work item of a Hopper forward kernel starts."""

from __future__ import annotations

from enum import IntEnum


class NextItem(IntEnum):
    """Where the next work item's first product starts.

    Attributes:
        NONE: after this item is stored.
        WITH_LAST_PV: together with this item's last P V.
        AFTER_LAST_PV: after the last P V, under the normalisation and store of O.
    """

    NONE = 0
    WITH_LAST_PV = 1
    AFTER_LAST_PV = 2

    def to_cpp_str(self) -> str:
        """The enumerator as C++ source text."""
        return f"NextItem::{self.name}"
