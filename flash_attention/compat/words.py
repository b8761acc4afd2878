"""Errors in the words of the function that was called, where they are not those of this library."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from flash_attention.errors import ModError

P = ParamSpec("P")
R = TypeVar("R")

# What a message advises to call instead has the words of that function; what is in quotes is the caller's.
CALLS = r"\bflash_attention\.[\w.]+(?:\([^)]*\))?"
QUOTES = r"(?<!\w)'[^'\n]*'(?!\w)"


def in_words(**theirs: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function say what is wrong by the names of its own arguments.

    What the function checks itself it names itself. This is for what is checked behind it, where an argument
    has another name. A trace leaves it out: there the errors are the tracer's.

    Args:
        theirs: the names that the caller knows, by those of this library.
    """
    known = re.compile(rf"(?<![\w.])(?<!its )({'|'.join(theirs)})(?![\w(])")
    twice = re.compile(rf"\b({'|'.join(set(theirs.values()))})(?: and| or|,)(?: no)? \1\b")

    def renamed(text: str, quoted: tuple[str, ...]) -> str:
        pieces = re.split("|".join((*map(re.escape, quoted), CALLS, QUOTES)).join("()"), text)
        pieces[::2] = (known.sub(lambda match: theirs[match[1]], piece) for piece in pieces[::2])
        return twice.sub(r"\1", "".join(pieces))

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **keywords: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                return function(*args, **keywords)
            try:
                return function(*args, **keywords)
            except (TypeError, ValueError, NotImplementedError) as error:
                if error.args and isinstance(error.args[0], str):
                    quoted = error.quoted if isinstance(error, ModError) else ()
                    error.args = (renamed(error.args[0], quoted), *error.args[1:])
                raise

        return call

    return decorate
