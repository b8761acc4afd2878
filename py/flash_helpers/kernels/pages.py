"""Pages of a cache of keys, as far as kernels care how many rows they have."""

from __future__ import annotations

PAGE_ROWS = 16  # ``kPageAlignment`` of hopper/forward/launcher.cuh


def page_obstacle(page_size: int) -> str | None:
    """Why bulk copies cannot reach pages of so many rows, or None: they take rows in groups of 16."""
    if page_size % PAGE_ROWS:
        return f"pages have {page_size} rows; they must have a multiple of {PAGE_ROWS}"
    return None
