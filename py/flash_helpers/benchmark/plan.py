"""How to measure: which times, how often."""

from __future__ import annotations

import re
from dataclasses import dataclass

MODES: dict[str, tuple[str, bool]] = {
    "hot": ("kernel", False),
    "paused": ("kernel", True),
    "cold": ("cold", False),
    "graph": ("graph", False),
    "call": ("call", False),
    "host": ("host", False),
}
"""Name of a timing in a row: (mode of the timer, whether to pause between rounds)."""

DEFAULT_MODES = ("hot", "paused")

_DEVICE = re.compile(r"cpu|cuda(:\d+)?", re.ASCII)


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        rounds: measurements of each implementation and mode.
        modes: names out of ``MODES``; those that the device's timer lacks are left out.
        pause_seconds: the pause of mode ``paused``.
        seed: of inputs and orders.
        seconds: no round of a mode begins later than this after its first one; None: there are all of them.
    """

    rounds: int = 11
    modes: tuple[str, ...] = DEFAULT_MODES
    pause_seconds: float = 0.08
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown:
            raise ValueError(f"unknown timing {', '.join(map(repr, unknown))}; known: {', '.join(MODES)}")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}; it must be at least 1")


def check_device_name(text: str | None) -> None:
    """Refuses what can name no device anywhere; ``runner.named_device`` says what is here.

    Raises:
        ValueError: neither ``cpu`` nor a CUDA device.
    """
    if text is not None and not _DEVICE.fullmatch(text):
        raise ValueError(f"device is {text!r}; valid: cpu, cuda, or a GPU by its number, such as cuda:1")
