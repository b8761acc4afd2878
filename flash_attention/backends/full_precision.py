"""Products of float32 tensors on the CPU in float32, whatever else the caller has allowed PyTorch.

``torch.set_float32_matmul_precision("medium")`` lets PyTorch round the factors to bfloat16, which has fewer
bits than float16.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_EXACT = ("ieee", "none", "highest")


class FullPrecision:
    """A context in which products are exact to float32. The setting is the process's: the first thread that
    enters changes it, the last one that leaves restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                precision = _precision()
                self._before = None if precision in _EXACT else precision
                if self._before is not None:
                    _set_precision("highest" if _own_setting is None else "ieee")
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._before is not None:
                _set_precision(self._before)


# From torch 2.9 on, products on the CPU have a setting of their own.
_own_setting: Any = getattr(torch.backends.mkldnn, "matmul", None)


def _precision() -> str:
    return torch.get_float32_matmul_precision() if _own_setting is None else _own_setting.fp32_precision


def _set_precision(precision: str) -> None:
    if _own_setting is None:
        torch.set_float32_matmul_precision(precision)
    else:
        _own_setting.fp32_precision = precision


full_precision = FullPrecision()
