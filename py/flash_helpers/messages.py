"""What the library tells its user unasked: a line on stderr, each once a process."""

from __future__ import annotations

import sys

_said: set[str] = set()


def say_once(text: str) -> None:
    """Prints ``flash_attention: text`` on stderr, unless this process has."""
    if text not in _said:
        _said.add(text)
        print(f"flash_attention: {text}", file=sys.stderr, flush=True)
