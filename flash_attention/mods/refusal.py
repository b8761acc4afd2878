"""Why a function cannot be recorded, with the line of the user's that says what cannot."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from flash_attention.errors import ModError

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def users_line() -> str:
    """``file:line: text`` of the innermost frame that is neither ours nor PyTorch's; empty: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
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


def refused(what: str, remedy: str) -> ModError:
    """The error for what the user's function has just done.

    Args:
        what: is not possible, a sentence without its end.
        remedy: what to write instead, a sentence.
    """
    line = users_line()
    return ModError(f"{what}{f', at {line}' if line else ''}. {remedy}")


def _inside(file: str) -> bool:
    return file.startswith((_OURS, _TORCH))


def _line(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()
    return f"{file}:{number}" + (f": {text}" if text else "")
