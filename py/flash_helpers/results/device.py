"""What a measured time belongs to: the card, its driver, and the kernels' sources."""

from __future__ import annotations

import functools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import flash_helpers
from flash_helpers.build import sources
from flash_helpers.build.cache import digest_of
from flash_helpers.build.flags import COMPILE_FLAGS
from flash_helpers.kernels.device_facts import DeviceFacts
from flash_helpers.kernels.direction import Direction
from flash_helpers.kernels.families import DIRECTIONS

DRIVER_FILE = Path("/proc/driver/nvidia/version")
UNKNOWN = "unknown"


@dataclass(frozen=True, order=True)
class TunedDevice:
    """A card as tuning results know it.

    Attributes:
        gpu: its name.
        capability: compute capability, ``9.0``.
        driver: the driver's version, or ``unknown``.
    """

    gpu: str
    capability: str
    driver: str

    @classmethod
    def of(cls, facts: DeviceFacts, driver: str | None = None) -> TunedDevice:
        """The device of these facts; ``driver`` defaults to this machine's."""
        major, minor = facts.capability
        return cls(facts.name, f"{major}.{minor}", driver or driver_version() or UNKNOWN)


@functools.cache
def driver_version() -> str | None:
    """The version of this machine's NVIDIA driver; None where there is none."""
    try:
        # "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
        if match := re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", DRIVER_FILE.read_text()):
            return match[0]
    except OSError:
        pass  # not Linux's driver, or a container without it: ask its tool
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


@functools.cache
def sources_digest(direction: Direction) -> str:
    """Stands for everything but the configuration that a direction's kernels are compiled from."""
    headers = sources.digest_of_headers(direction.launcher_header, sources.include_root())
    return digest_of(flash_helpers.__version__, direction.family.name, direction.name, headers, COMPILE_FLAGS)


def present_sources() -> tuple[str, ...]:
    """The digests of all directions as they are now."""
    return tuple(sources_digest(direction) for direction in DIRECTIONS)
