"""Which library in the cache holds which kernel, without asking a compiler.

An entry is one small file, ``index/<headers digest>/<target>-<kernel id>.json``, under a digest of its own.
It names the library's key, so it can go stale (the library was deleted or damaged) but never wrong: a kernel
whose headers or generated text changed looks for another file or finds another digest inside, and a damaged
entry counts as missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flash_helpers
from flash_helpers import environment
from flash_helpers.build import sources
from flash_helpers.build.cache import KernelCache, digest_of
from flash_helpers.build.flags import COMPILE_FLAGS, compile_flags
from flash_helpers.build.instantiations import kernel_id, kernel_source
from flash_helpers.content import ContentError, seal, unseal
from flash_helpers.kernel_selection import parse_kernel
from flash_helpers.kernels.direction import Direction
from flash_helpers.kernels.families import DIRECTIONS, direction_of
from flash_helpers.kernels.kernel import Kernel
from flash_helpers.kernels.problem import FORWARD

if TYPE_CHECKING:
    from flash_helpers.build.compile import BuildResult


def remember(cache: KernelCache, result: BuildResult, include_root: Path | None = None) -> None:
    """Writes an entry for every kernel of a library that was built into ``cache``."""
    folder = _folder(direction_of(result.kernels[0].kernel), include_root)
    for compiled in result.kernels:
        entry = {
            "direction": direction_of(compiled.kernel).name,
            "kernel": compiled.kernel.short_form(),
            "target": result.target,
            "source": _source_digest(compiled.kernel, result.target),
            "library": result.path.parent.name,
        }
        cache.write_text(f"{folder}/{_file_name(compiled.kernel, result.target)}", seal(entry))


def find_library(
    cache: KernelCache, kernel: Kernel, target: int, include_root: Path | None = None
) -> Path | None:
    """The library that holds this kernel, built from the present headers; ``None`` if there is none."""
    texts = cache.read_texts(_folder(direction_of(kernel), include_root), _file_name(kernel, target))
    for entry in _parse(texts):
        if entry["source"] == _source_digest(kernel, target) and (
            library := cache.get("libraries", entry["library"])
        ):
            return library.path
    return None


def built_kernels(
    cache: KernelCache, targets: Iterable[int], include_root: Path | None = None
) -> list[tuple[str, int]]:
    """(id, target) of every kernel built from the present headers for one of ``targets``."""
    wanted = set(targets)
    entries = []
    for direction in DIRECTIONS:
        entries += _parse(cache.read_texts(_folder(direction, include_root), "*.json"))
    return sorted({(entry["kernel"], entry["target"]) for entry in entries if entry["target"] in wanted})


def is_current(facts: dict[str, Any], include_root: Path | None = None) -> bool:
    """Whether compiling the kernel now would give an object with these facts, leaving the compiler aside.

    Args:
        facts: of an artifact of kind ``objects``.
        include_root: in place of the package's headers.
    """
    kernel = parse_kernel(facts["kernel"])
    direction, target, root = direction_of(kernel), facts["target"], include_root or sources.include_root()
    return bool(
        facts.get("direction", FORWARD) == direction.name
        and (facts["version"], facts["source"]) == (flash_helpers.__version__, _source_digest(kernel, target))
        and facts["headers"] == sources.digest_of_headers(direction.launcher_header, root)
        and tuple(facts["flags"]) == (*compile_flags(direction.family, target), *environment.nvcc_flags())
    )


def _file_name(kernel: Kernel, target: int) -> str:
    return f"{target}-{kernel_id(kernel)}.json"


def _source_digest(kernel: Kernel, target: int) -> str:
    return digest_of(kernel_source(kernel, target))


def _folder(direction: Direction, include_root: Path | None) -> str:
    headers = sources.digest_of_headers(direction.launcher_header, include_root or sources.include_root())
    flags = (*COMPILE_FLAGS, *environment.nvcc_flags())
    return (
        f"index/{digest_of(flash_helpers.__version__, direction.family.name, direction.name, headers, flags)}"
    )


def _parse(texts: Iterable[str]) -> list[dict]:
    entries = []
    for text in texts:
        with contextlib.suppress(ContentError):
            entries.append(unseal(text))
    return entries
