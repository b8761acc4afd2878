"""``flash-attention cache``: how large the folder of compiled kernels is, what is in it, clearing it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flash_helpers.build import KernelCache, built_kernels
from flash_helpers.build.cache import FACTS_FILE
from flash_helpers.commands.output import console_for, shown_bytes, write_json
from flash_helpers.commands.writable import check_file

PARTS = {
    "objects": "compiled kernels",
    "libraries": "kernel libraries",
    "index": "which library holds which kernel",
    "logs": "output of failed compilations",
    "tmp": "unfinished work",
    "locks": "locks",
}
"""The folders below the cache's root, and nothing else, belong to it."""


class CacheNotClearedError(OSError):
    """A part of the cache can't be removed."""


@dataclass(frozen=True)
class CachePart:
    """One kind of content.

    Attributes:
        name: the folder.
        meaning: in words.
        files: number of files.
        bytes: their size.
    """

    name: str
    meaning: str
    files: int
    bytes: int


@dataclass(frozen=True)
class CachedObject:
    """One compiled kernel.

    Attributes:
        kernel: its short form.
        bytes: size of the object file.
        seconds: how long it took to compile.
        targets: generations for which a kernel of this name is usable now: none: made from older sources.
    """

    kernel: str
    bytes: int
    seconds: float
    targets: tuple[int, ...]


def cache_parts(cache: KernelCache | None = None) -> list[CachePart]:
    """The size of every part."""
    root = (cache or KernelCache()).root
    found = []
    for name, meaning in PARTS.items():
        sizes = list(_sizes(root / name))
        found.append(CachePart(name, meaning, len(sizes), sum(sizes)))
    return found


def cached_objects(cache: KernelCache | None = None) -> list[CachedObject]:
    """Every compiled kernel in the cache, by name."""
    cache = cache or KernelCache()
    targets: dict[str, list[int]] = {}
    for name, target in built_kernels(cache, range(80, 200)):
        targets.setdefault(name, []).append(target)
    found = []
    for path in (cache.root / "objects").glob(f"*/{FACTS_FILE}"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # damaged or just being removed
            facts = json.loads(path.read_text(encoding="utf-8"))
            name = facts["kernel"]
            usable = tuple(targets.get(name, ()))
            found.append(CachedObject(name, int(facts["size"]), float(facts["seconds"]), usable))
    return sorted(found, key=lambda entry: (entry.kernel, entry.bytes))


def clear_cache(cache: KernelCache | None = None) -> int:
    """Removes every compiled kernel; tuning results stay. Running programs keep what they have loaded.

    Returns:
        The bytes freed.

    Raises:
        CacheNotClearedError: something can't be removed.
    """
    cache = cache or KernelCache()
    freed = sum(part.bytes for part in cache_parts(cache))
    for name in PARTS:
        try:
            shutil.rmtree(cache.root / name)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise CacheNotClearedError(
                f"{cache.root / name} can't be removed: {error.strerror}; remove it yourself, or name "
                "another folder with FLASH_ATTENTION_CACHE_DIR"
            ) from error
    return freed


def cache_command(
    action: str = "size", json_path: Path | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Does what ``action`` says and prints it.

    Args:
        action: ``size``, ``list`` or ``clear``.

    Raises:
        ValueError: another action.
        NotWritableError: ``json_path`` can't be written.
    """
    check_file(json_path)
    console = console or console_for(json_path)
    cache = KernelCache()
    document: dict[str, Any] = {"folder": str(cache.root)}
    console.print(f"folder {cache.root}", markup=False)
    if action == "size":
        parts = cache_parts(cache)
        _print_parts(parts, console)
        document["parts"] = [asdict(part) for part in parts]
    elif action == "list":
        objects = cached_objects(cache)
        _print_objects(objects, console)
        document["kernels"] = [asdict(entry) for entry in objects]
    elif action == "clear":
        document["freed"] = clear_cache(cache)
        console.print(f"freed {shown_bytes(document['freed'])}; tuning results stay")
    else:
        raise ValueError(f"cache can't {action!r}; valid: size, list, clear")
    write_json(json_path, document)
    return document


def _print_parts(parts: list[CachePart], console: Console) -> None:
    table = Table("part", "what")
    table.add_column("files", justify="right")
    table.add_column("size", justify="right")
    for part in parts:
        table.add_row(part.name, part.meaning, str(part.files), shown_bytes(part.bytes))
    table.add_section()
    table.add_row("all", "", str(sum(p.files for p in parts)), shown_bytes(sum(p.bytes for p in parts)))
    console.print(table)


def _print_objects(objects: list[CachedObject], console: Console) -> None:
    table = Table()
    table.add_column("kernel", overflow="fold")
    for title in ("size", "compiled in", "usable on"):
        table.add_column(title, justify="right")
    for entry in objects:
        usable = ", ".join(f"sm_{target}" for target in entry.targets) or "older sources"
        table.add_row(Text(entry.kernel), shown_bytes(entry.bytes), f"{entry.seconds:.1f} s", usable)
    console.print(table)
    console.print(f"{len(objects)} compiled kernels, {shown_bytes(sum(e.bytes for e in objects))}")


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # another process may remove it meanwhile
            if path.is_file():
                yield path.stat().st_size
