"""Modules under other libraries' names are there while a test runs, and no longer."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _names_are_given_back() -> Iterator[None]:
    """Who looks for an installed flash-attn afterwards, as Transformers does, must find what is installed."""
    before = dict(sys.modules)
    yield
    for name in [name for name, module in sys.modules.items() if getattr(module, "__spec__", None) is None]:
        if name in before:
            sys.modules[name] = before[name]
        else:
            del sys.modules[name]
