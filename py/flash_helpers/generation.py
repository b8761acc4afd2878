"""The generation of choices that this process is in.

What ``attention`` runs follows from the problem, the device, the tuning results and, where a kernel cannot be
built, from what is built. A process finds these out once and keeps what it found, so that equal calls run the
same kernel. All of it is forgotten together, when a new generation begins:

- when ``prepare`` is called;
- when ``tune`` ends in this process, or a table that ships is written;
- when a variable of ``environment.VARIABLES`` has changed, at the next call whose choice is not known yet.

A cache takes part by ``@forgets``; nothing else has to know of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from flash_helpers import environment

Forget = TypeVar("Forget", bound=Callable[[], object])

lock = threading.RLock()  # held while a generation begins, and while something is kept for the present one
_number = 0
_forgets: list[Callable[[], object]] = []
_environment: tuple[str, ...] | None = None  # the variables as the present generation has read them


def number() -> int:
    """The present generation. What was found out in an earlier one must not be kept."""
    return _number


def forgets(forget: Forget) -> Forget:
    """Has a function called whenever a new generation begins: it empties one cache."""
    _forgets.append(forget)
    return forget


def begin() -> None:
    """Begins a new generation: choices are made anew from now on."""
    global _number, _environment
    with lock:
        _number += 1
        _environment = environment.values()
        for forget in _forgets:
            forget()


def follow_environment() -> None:
    """Begins a new generation if an environment variable has changed since the present one began."""
    global _environment
    values = environment.values()
    if _environment is None:
        _environment = values
    elif values != _environment:
        begin()
