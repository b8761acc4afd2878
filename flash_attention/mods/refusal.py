"""Why a function cannot be recorded, with the line of the user's that says what cannot."""

from __future__ import annotations

import functools
import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from flash_attention.errors import ModError
from flash_helpers import mods

_OURS = (str(Path(__file__).parent), str(Path(mods.__file__).parent))
_LONGEST_LINE = 160
_CALLER = str(Path(__file__).with_name("tracing.py"))
_TORCH = str(Path(torch.__file__).parent)


def users_line() -> str:
    """``file:line: text`` of the innermost frame that is neither ours nor PyTorch's; empty: there is none.

    What called ``trace`` is no part of the function.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _CALLER:
        if not _inside(frame.f_code.co_filename):
            return _line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """The same of the place where an error was raised."""
    for found in reversed(traceback.extract_tb(error.__traceback__)):
        if not _inside(found.filename) and found.lineno is not None:
            return _line(found.filename, found.lineno)
    return ""


def line_of_definition(function: Any) -> str:
    """The same of a function itself; empty: it has none, as one of PyTorch's."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return "" if code is None or _inside(code.co_filename) else _line(code.co_filename, code.co_firstlineno)


def refused(what: str, remedy: str) -> ModError:
    """The error for what the user's function has just done.

    Args:
        what: is not possible, a sentence without its end.
        remedy: what to write instead, a sentence.
    """
    line = users_line()
    return mod_error(f"{what}{f', at {line}' if line else ''}. {remedy}", line)


def mod_error(message: str, *quoted: str) -> ModError:
    """The error with these parts, of which some may be empty, marked as the user's words."""
    error = ModError(message)
    error.quoted = tuple(part for part in quoted if part)
    return error


def _inside(file: str) -> bool:
    return file.startswith((*_OURS, _TORCH))


def _line(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f": {_shortened(text)}" if text else "")


def _shortened(line: str) -> str:
    """A line of code, without the end of a very long one."""
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} …"
