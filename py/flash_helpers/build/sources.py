"""Where the kernels' C++ headers are, and which of them one header reads."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from flash_helpers.build.errors import SourcesNotFoundError
from flash_helpers.kernels.cpp_headers import FOLDER, write_headers

_PACKAGE = Path(__file__).resolve().parents[1]
_CANDIDATES = (
    _PACKAGE / "csrc" / "include",  # installed: src/ ships as flash_helpers/csrc
    _PACKAGE.parents[1] / "src" / "include",  # a checkout
)
_QUOTED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def include_root() -> Path:
    """The folder that quoted includes are relative to, in a checkout or in an installation.

    In a checkout the headers that the dataclasses generate are brought up to date first.

    Raises:
        SourcesNotFoundError: the headers did not come with the package, or cannot be generated.
    """
    for folder in _CANDIDATES:
        if (folder / "flash_attention.cuh").is_file():
            _generate_once(folder)
            return folder
    tried = ", ".join(map(str, _CANDIDATES))
    raise SourcesNotFoundError(
        f"the kernels' headers are missing (looked in {tried}); install the package again"
    )


@functools.cache
def _generate_once(folder: Path) -> None:
    """Once a process: the dataclasses do not change meanwhile. Where nothing differs, nothing is written."""
    try:
        write_headers(folder)
    except OSError as error:
        raise SourcesNotFoundError(
            f"the headers in {folder / FOLDER} are not those of this version and cannot be written "
            f"({error}); install the package again, or make the folder writable"
        ) from error


def headers_of(header: str, root: Path) -> list[Path]:
    """Every file that ``header`` reads through quoted includes, itself included, in order of discovery.

    An include that is not found under ``root`` belongs to the toolkit, which the compiler's version
    stands for.

    Args:
        header: path relative to ``root``.
        root: the include root.
    """
    found: dict[Path, None] = {}
    pending = [root / header]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        if not path.is_file():
            raise SourcesNotFoundError(f"header {header!r} is missing from {root}; install the package again")
        found[path] = None
        for name in reversed(_QUOTED_INCLUDE.findall(path.read_text(encoding="utf-8"))):
            for candidate in (path.parent / name, root / name):
                if candidate.is_file():
                    pending.append(candidate.resolve())
                    break
    return list(found)


def digest_of_headers(header: str, root: Path) -> str:
    """A hexadecimal digest of all text that ``header`` brings in; independent of where ``root`` lies."""
    root = root.resolve()
    digest = hashlib.sha256()
    for path in sorted(headers_of(header, root)):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
