"""``let_go``: no thread of gloo holds a tensor when a call returns.

A thread that holds a tensor longer than Python does needs the interpreter to free it. Where a program ends
meanwhile, the interpreter ends that thread within a function that must not be left, and the process aborts:
"terminate called without an active exception".
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

LONGEST = 1.0  # seconds; later the tensors are left to the thread
PAUSE = 2e-5


@contextmanager
def let_go(tensors: Sequence[Tensor]) -> Iterator[None]:
    """What runs within may hand tensors of the CPU to gloo; at its end gloo has let them go.

    Nobody waits for tensors of another device: NCCL may hold them until the device has worked.
    """
    before = [(x, _holders(x)) for x in tensors if x.device.type == "cpu"]
    yield
    end = time.monotonic() + LONGEST
    for x, holders in before:
        while _holders(x) > holders and time.monotonic() < end:
            time.sleep(PAUSE)


def _holders(x: Tensor) -> int:
    """How many hold a tensor; all of Python's are one. 0: this torch does not say it."""
    count = getattr(x, "_use_count", None)
    return 0 if count is None else int(count())
