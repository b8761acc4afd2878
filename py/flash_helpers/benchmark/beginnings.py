"""Rows that the caller names by their beginnings, joined by commas, which the names have themselves."""

from __future__ import annotations

from collections.abc import Iterable


def beginnings(text: str, known: Iterable[str], what: str) -> tuple[str, ...]:
    """The beginnings in ``text``, each as long as it can be: ``packed, mixed`` is one where a name has it.

    Args:
        text: what the caller gave; empty: none.
        known: the names.
        what: they are of, for the message.

    Raises:
        ValueError: no name begins so; the message lists the known ones.
    """
    names, parts, found = tuple(dict.fromkeys(known)), _parts(text), list[str]()
    while parts:
        for n in range(len(parts), 0, -1):
            joined = ", ".join(parts[:n])
            if any(name.startswith(joined) for name in names):
                found.append(joined)
                del parts[:n]
                break
        else:
            raise ValueError(f"unknown {what} {parts[0]!r}; known: {'; '.join(names)}")
    return tuple(found)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
