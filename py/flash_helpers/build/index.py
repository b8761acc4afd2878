"""Which library in the cache holds which kernel, without asking a compiler.

An entry is one small file, ``index/<headers digest>/<target>-<kernel id>.json``. It names the library's key,
so it can go stale (the library was deleted or damaged) but never wrong: a kernel whose headers or
generated text changed looks for another file or finds another digest inside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import flash_helpers
from flash_helpers.build import sources
from flash_helpers.build.cache import KernelCache, digest_of
from flash_helpers.build.compile import COMPILE_FLAGS, BuildResult
from flash_helpers.build.families import FAMILIES, KernelFamily, family_of
from flash_helpers.build.instantiations import kernel_id, kernel_source
from flash_helpers.configs.kernel import ForwardKernel


def remember(cache: KernelCache, result: BuildResult, include_root: Path | None = None) -> None:
    """Writes an entry for every kernel of a library that was built into ``cache``."""
    library_key = result.path.parent.name
    for compiled in result.kernels:
        name, source_digest = _entry(compiled.kernel, result.target, include_root)
        entry = {
            "kernel": compiled.kernel.short_form(),
            "target": result.target,
            "source": source_digest,
            "library": library_key,
        }
        cache.write_text(name, json.dumps(entry))


def find_library(
    cache: KernelCache, kernel: ForwardKernel, target: int, include_root: Path | None = None
) -> Path | None:
    """The library that holds exactly this kernel, built from the headers of now; ``None`` if there is none."""
    name, source_digest = _entry(kernel, target, include_root)
    for entry in _parse(cache.read_texts(str(Path(name).parent), Path(name).name)):
        if entry["source"] == source_digest and (library := cache.get("libraries", entry["library"])):
            return library.path
    return None


def built_kernels(
    cache: KernelCache, targets: Iterable[int], include_root: Path | None = None
) -> list[tuple[str, int]]:
    """(id, target) of every kernel in the cache that was built from the headers of now for one of ``targets``."""
    wanted = set(targets)
    entries = []
    for family in FAMILIES:
        entries += _parse(cache.read_texts(_folder(family, include_root), "*.json"))
    return sorted({(entry["kernel"], entry["target"]) for entry in entries if entry["target"] in wanted})


def _entry(kernel: ForwardKernel, target: int, include_root: Path | None) -> tuple[str, str]:
    """The name of a kernel's entry and the digest of its generated text."""
    name = f"{_folder(family_of(kernel), include_root)}/{target}-{kernel_id(kernel)}.json"
    return name, digest_of(kernel_source(kernel, target))


def _folder(family: KernelFamily, include_root: Path | None) -> str:
    headers = sources.digest_of_headers(family.launcher_header, include_root or sources.include_root())
    return f"index/{digest_of(flash_helpers.__version__, family.name, headers, COMPILE_FLAGS)}"


def _parse(texts: Iterable[str]) -> list[dict]:
    entries = []
    for text in texts:
        try:
            entry = json.loads(text)
        except ValueError:
            continue  # damaged: as good as none
        if isinstance(entry, dict) and {"kernel", "target", "source", "library"} <= entry.keys():
            entries.append(entry)
    return entries
