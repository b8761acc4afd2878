"""The layers of the tests: each is in one. ``make test`` runs ``unit``, ``make test-all`` all but ``gpu``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

LAYERS = {
    "unit": "needs no compiler and takes no long time: the layer of tests that say nothing else",
    "compile": "runs a C++ or CUDA compiler, or takes long",
    "install": "installs into environments of its own, or runs programs of the documentation",
    "perf": "is about time, which depends on what else runs: alone, on demand",
    "gpu": "needs a CUDA GPU of compute capability 8.0 or newer; deselected where there is none",
}
FOLDERS = {"gpu": "gpu", "install": "install", "docs": "install", "cpp": "compile"}
"""Folders whose tests are all of one layer; others say it by a mark, ``pytest.mark.compile``."""

COMPILERS = ("nvcc", "g++", "c++", "gcc", "cc", "clang", "clang++", "ptxas", "cicc")
_started: list[str] = []


def layer_of(item: pytest.Item) -> str:
    """The layer of a test: its mark's, else its folder's, else ``unit``. Of several marks ``gpu`` wins.

    Raises:
        pytest.UsageError: it has several other marks.
    """
    marked = [name for name in LAYERS if item.get_closest_marker(name)]
    if "gpu" in marked:
        return "gpu"
    if len(marked) > 1:
        raise pytest.UsageError(f"{item.nodeid} is marked {' and '.join(marked)}; a test is in one layer")
    folder = item.path.relative_to(Path(__file__).parent).parts[0] if _is_ours(item.path) else ""
    return marked[0] if marked else FOLDERS.get(folder, "unit")


def _is_ours(path: Path) -> bool:
    return Path(__file__).parent in path.parents


def watch_compilers() -> None:
    """From now on notes each start of a compiler by this process; those that a test made up do not count."""
    sys.addaudithook(_on_event)


def compilers_started() -> list[str]:
    """The compilers started since the last call."""
    started = _started.copy()
    _started.clear()
    return started


def _on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event != "subprocess.Popen":
        return
    executable, words = arguments[0], arguments[1]
    first = words[0] if isinstance(words, list | tuple) and words else executable
    if not isinstance(first, str | os.PathLike):
        return
    path = Path(os.fspath(first))
    asks_only = isinstance(words, list | tuple) and len(words) == 2 and str(words[1]) == "--version"
    made_up = str(path).startswith(tempfile.gettempdir()) or "pytest-of-" in str(path)
    if path.name in COMPILERS and not asks_only and not made_up:
        _started.append(str(path))
