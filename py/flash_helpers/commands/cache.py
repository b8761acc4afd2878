"""``flash-attention cache``: how large the folder of compiled kernels is, what is in it, clearing it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flash_helpers.build import KernelCache
from flash_helpers.build.cache import FACTS_FILE, MAX_FACTS
from flash_helpers.build.index import is_current
from flash_helpers.build.store import remove_part
from flash_helpers.console.output import console_for, shown_bytes, write_json
from flash_helpers.console.writable import check_file
from flash_helpers.content import CONTENT_ERRORS, read_text, unseal

PARTS = {
    "objects": "compiled kernels",
    "libraries": "kernel libraries",
    "index": "which library holds which kernel",
    "logs": "output of failed compilations",
    "locks": "locks",
    "tmp": "unfinished work",
}
"""The folders of a store. Nothing else is listed, measured or removed."""

EARLIER_PARTS = ("objects", "libraries", "index", "logs", "locks")
"""What versions before 0.1 put beside the store. They are only named: a user's own may be called so."""


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
        targets: the generation that it is compiled for; none where headers, flags or version have changed.
    """

    kernel: str
    bytes: int
    seconds: float
    targets: tuple[int, ...]


def cache_parts(cache: KernelCache | None = None) -> list[CachePart]:
    """The size of every part."""
    store = (cache or KernelCache()).store
    found = []
    for name, meaning in PARTS.items():
        sizes = list(_sizes(store / name))
        found.append(CachePart(name, meaning, len(sizes), sum(sizes)))
    return found


def cached_objects(cache: KernelCache | None = None) -> list[CachedObject]:
    """Every compiled kernel in the cache, by name."""
    cache = cache or KernelCache()
    found: dict[tuple[str, int], CachedObject] = {}
    for path in (cache.store / "objects").glob(f"*/{FACTS_FILE}"):
        # An entry that is damaged, or that is being removed, counts as missing.
        with contextlib.suppress(OSError, *CONTENT_ERRORS):
            facts = unseal(read_text(path, MAX_FACTS))
            name, target = facts["kernel"], facts["target"]
            entry = CachedObject(
                name, facts["size"], facts["seconds"], (target,) if is_current(facts) else ()
            )
            found[path.parent.name, target] = entry
    return sorted(found.values(), key=lambda entry: (entry.kernel, entry.targets, entry.bytes))


@dataclass(frozen=True)
class Cleared:
    """What ``clear_cache`` did.

    Attributes:
        freed: bytes.
        in_use: folders of unfinished work that a running process works in, which stay.
    """

    freed: int
    in_use: int


def clear_cache(cache: KernelCache | None = None) -> Cleared:
    """Removes every compiled kernel; tuning results stay, and all that the user put there.

    Running programs keep what they have loaded, and running builds go on.

    Raises:
        CacheNotClearedError: something can't be removed, or is a link, which is not followed.
    """
    cache = cache or KernelCache()
    before = sum(part.bytes for part in cache_parts(cache))
    in_use = 0
    for name in PARTS:
        try:
            in_use += remove_part(cache.store, name)
        except OSError as error:
            raise CacheNotClearedError(
                f"{cache.store / name} can't be removed: {error.strerror or error}; remove it yourself, or "
                "name another folder with FLASH_ATTENTION_CACHE_DIR"
            ) from error
    with contextlib.suppress(OSError):  # a build is under way
        cache.store.rmdir()
    return Cleared(before - sum(part.bytes for part in cache_parts(cache)), in_use)


def earlier_folders(cache: KernelCache) -> list[Path]:
    """Folders beside the store that an earlier version of the library seems to have made; it removes none."""
    return [
        folder for name in EARLIER_PARTS if (folder := cache.root / name).is_dir() and not folder.is_symlink()
    ]


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
        document |= asdict(clear_cache(cache))
        stay = f", and {document['in_use']} builds under way" if document["in_use"] else ""
        console.print(f"freed {shown_bytes(document['freed'])}; tuning results stay{stay}")
    else:
        raise ValueError(f"unknown action {action!r} of cache; valid: size, list, clear")
    if earlier := earlier_folders(cache):
        document["earlier"] = [str(folder) for folder in earlier]
        console.print(
            "not used any more, and not removed since they may be yours: " + ", ".join(document["earlier"]),
            markup=False, soft_wrap=True,
        )  # fmt: skip
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
        usable = ", ".join(f"sm_{target}" for target in entry.targets) or "none: of other sources or flags"
        table.add_row(Text(entry.kernel), shown_bytes(entry.bytes), f"{entry.seconds:.1f} s", usable)
    console.print(table)
    console.print(f"{len(objects)} compiled kernels, {shown_bytes(sum(e.bytes for e in objects))}")


def _sizes(folder: Path) -> Iterator[int]:
    if folder.is_symlink():
        return
    for place, _, names in os.walk(folder):  # follows no links
        for name in names:
            with contextlib.suppress(OSError):  # another process may remove it meanwhile
                facts = os.lstat(os.path.join(place, name))
                if stat.S_ISREG(facts.st_mode):
                    yield facts.st_size
