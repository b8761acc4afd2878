"""How much memory new work on this machine can have."""

from __future__ import annotations

import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that can be allocated now: the machine's, or the container's if its limit is lower.

    Memory that only caches files counts, since the system gives it up.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")  # without file caches
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = (_CONTROL_GROUP / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            available = min(available, int(limit) - _used_by_group())
    except (OSError, ValueError, IndexError):
        pass  # no such files here: the figure so far is good enough
    return max(0, available)


def _used_by_group() -> int:
    """Bytes that the container holds and the system would not give up."""
    used = int((_CONTROL_GROUP / "memory.current").read_text(encoding="ascii"))
    for line in (_CONTROL_GROUP / "memory.stat").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            used -= int(value)
    return used
