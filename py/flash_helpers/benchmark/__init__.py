"""Measure kernels against the best peers: correctness first, in one process, in random order.

``bench`` is the function behind ``flash-attention bench``. What a command checks before it measures
(``plan``, ``peers``) imports no torch; the names below import it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_helpers.benchmark.results import Results, Row, check_same_card
    from flash_helpers.benchmark.runner import bench
    from flash_helpers.problem import Problem

__all__ = ["Problem", "Results", "Row", "bench", "check_same_card"]

_HOMES = {
    "Problem": "flash_helpers.problem",
    "Results": "flash_helpers.benchmark.results",
    "Row": "flash_helpers.benchmark.results",
    "bench": "flash_helpers.benchmark.runner",
    "check_same_card": "flash_helpers.benchmark.results",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
