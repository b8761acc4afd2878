"""Words for the user: a line on stderr, each once a process, and what kind of thing was given."""

from __future__ import annotations

import sys

_said: set[str] = set()


def named_type(value: object) -> str:
    """What a value is, for "it is …": ``None``, or the name of its type with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIO" or name == "ndarray" else f"a {name}"


def say_once(text: str) -> None:
    """Prints ``flash_attention: text`` on stderr, unless this process has."""
    if text not in _said:
        _said.add(text)
        print(f"flash_attention: {text}", file=sys.stderr, flush=True)
