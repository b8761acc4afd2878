"""Failures of flash-attn's tests where they allow gradients of exactly 0 alone.

A query that sees one key has a weight of 1, whatever Q and K are: their gradients are 0, PyTorch's are too,
and the tests' tolerance, a multiple of PyTorch's error, is 0. The library subtracts two sums there that are
equal but for their rounding.
"""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import Any

ROUNDING = 1e-5
"""Largest gradient that counts as the rounding of sums of up to 256 products of normal numbers in float32."""
RTOL = 2
"""The tests' factor of PyTorch's error."""


def only_zero_was_allowed(where: TracebackType | None) -> bool:
    """Whether a test ended since a gradient that has to be 0 is the rounding of its sums.

    What else the test would have asserted of gradients is looked at as it does.

    Args:
        where: the traceback of its AssertionError.
    """
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    seen: dict[str, Any] = where.tb_frame.f_locals if where is not None else {}
    asserted = (traceback.extract_tb(where)[-1].line or "") if where is not None else ""
    if not asserted.startswith(("assert (dq - dq_ref)", "assert (dk - dk_ref)")):
        return False
    if any(f"{name}{suffix}" not in seen for name in ("dq", "dk", "dv") for suffix in ("", "_ref", "_pt")):
        return False
    zeros = 0
    for name in ("dq", "dk", "dv"):
        found, right, pytorch = (seen[f"{name}{suffix}"] for suffix in ("", "_ref", "_pt"))
        if bool((right == 0).all()):
            zeros += 1
            room = ROUNDING
        else:
            more = 2 * float((right + 0.3 - 0.3 - right).abs().max())
            room = RTOL * float((pytorch - right).abs().max()) + more
        if not float((found - right).abs().max()) <= room:
            return False
    return zeros > 0
