"""Reading files that may hold anything: a wrong one raises ``ContentError`` and costs little memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MAX_BYTES = 64 << 20  # the largest result file of the project has 2 MB

CONTENT_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What code raises that takes wrong content for right: a reader turns them into an exception of its own."""


class ContentError(ValueError):
    """A file does not hold what it should; the message says what is wrong, without the path."""


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """The text of a regular file.

    Args:
        path: the file. Devices and pipes are refused: they may have no end, or wait for ever.
        limit: bytes; a longer file is refused.

    Raises:
        ContentError: no regular file, too long, or no UTF-8.
        OSError: it can't be opened or read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ContentError("it is no regular file")
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ContentError(f"it has more than the {limit:,} bytes that such a file may have")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContentError(f"it is no text: {error}") from error


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ContentError: no JSON, or nested deeper than can be read.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ContentError(f"it is no JSON: {error}") from error
    except RecursionError as error:
        raise ContentError("it is nested too deeply") from error


def read_json(path: Path, limit: int = MAX_BYTES) -> Any:
    """The value in a JSON file. Raises what ``read_text`` and ``parse_json`` raise."""
    return parse_json(read_text(path, limit))


def typed(values: Any, name: str, kind: type[T] | tuple[type[T], ...]) -> T:
    """The entry of a JSON object, which has to be of a type; True and False are no numbers.

    Raises:
        ContentError: there is none, or it is something else.
    """
    value = values.get(name) if isinstance(values, dict) else None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ContentError(f"{name} is {value!r:.80}")
    return value


def amount(value: Any) -> float:
    """A finite number from 0 on.

    Raises:
        ContentError: the value is something else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ContentError(f"{value!r:.80} is no finite number from 0 on")
    return float(value)


def seal(values: dict[str, Any]) -> str:
    """JSON of ``values`` with a digest of them, so that any later change shows."""
    return json.dumps({"sha256": _digest(values), "values": values}, indent=1)


def unseal(text: str) -> dict[str, Any]:
    """The values that ``seal`` wrote.

    Raises:
        ContentError: the text is not what was written.
    """
    document = parse_json(text)
    values = document.get("values") if isinstance(document, dict) else None
    try:
        if isinstance(values, dict) and document["sha256"] == _digest(values):
            return values
    except (KeyError, RecursionError):
        pass
    raise ContentError("it was changed after it was written")


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
