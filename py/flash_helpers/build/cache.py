"""The content-addressed cache of compiled output.

An artifact is a folder ``<root>/<kind>/<key>/`` with one file and ``facts.json`` (the file's name,
size and SHA-256, and whatever the maker wants to remember). The key names everything that the file
depends on, so an artifact is never updated: it is there and right, or it is not there.

- Published by renaming a finished folder into place: no reader sees half a file.
- One maker at a time for each key, by an operating system lock that dies with its process. Readers
  take no lock. Correctness does not rest on the lock: two makers would rename equal contents.
- Read with size and digest checked: a damaged artifact counts as missing and is made again.
- Libraries that came with the package (``flash_helpers/prebuilt``) are found as if they were in the cache.
- Where the folder cannot be written, a private folder in the temporary directory is used instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from flash_helpers import environment

FACTS_FILE = "facts.json"
PREBUILT = Path(__file__).resolve().parents[1] / "prebuilt"  # what a wheel brought; read, never written
LOCK_TIMEOUT_S = 900.0  # a maker that takes longer than this is stuck: make the artifact beside it
_ABANDONED_S = 24 * 3600.0  # age at which another process' unfinished folder is swept away


@dataclass(frozen=True)
class Artifact:
    """A verified artifact.

    Attributes:
        path: the file.
        facts: what the maker remembered about it.
        made_now: whether this call made it.
    """

    path: Path
    facts: dict[str, Any]
    made_now: bool = False


Make = Callable[[Path], "tuple[str, dict[str, Any]]"]
"""Makes an artifact in the empty folder given; returns the file's name there and the facts."""


def digest_of(*parts: object) -> str:
    """The key that stands for ``parts``, which JSON can write: 40 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:40]


class KernelCache:
    """The cache below one folder.

    Args:
        root: the folder; ``None`` takes ``environment.cache_dir()``. It is made when first written to.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or environment.cache_dir()

    def get(self, kind: str, key: str) -> Artifact | None:
        """The artifact, verified; ``None`` where it is missing or damaged."""
        for root in self._roots():
            if artifact := _read(root / kind / key):
                return artifact
        return None

    def get_or_make(self, kind: str, key: str, make: Make) -> Artifact:
        """The artifact, made by this process or by another that is at it already.

        Args:
            kind: ``objects`` or ``libraries``.
            key: digest of everything that it is made of.
            make: makes its files in the folder that it is given, where nobody has made them yet.

        Raises:
            OSError: neither the cache folder nor the temporary directory can be written.
        """
        if artifact := self.get(kind, key):
            return artifact
        root = self.writable_root()
        with _lock(root / "locks" / f"{kind}-{key}.lock"):
            if artifact := self.get(kind, key):
                return artifact
            return _make(root, kind, key, make)

    def write_text(self, name: str, text: str) -> Path:
        """Writes a small file below the root, atomically: readers see the old text or the new."""
        path = self.writable_root() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with _unfinished(self.writable_root(), path.name) as folder:
            (folder / path.name).write_text(text, encoding="utf-8")
            os.replace(folder / path.name, path)
        return path

    def read_texts(self, folder: str, pattern: str) -> list[str]:
        """The small files of one folder below the root whose name matches ``pattern``."""
        texts = []
        for root in self._roots():
            for path in sorted((root / folder).glob(pattern)):
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    texts.append(path.read_text(encoding="utf-8"))
        return texts

    def writable_root(self) -> Path:
        """The folder that new artifacts go to: ``root``, or the private one where it can't be written."""
        try:
            _check_writable(self.root)
        except OSError as error:
            fallback = _private_folder()
            _say_once(
                f"flash_attention: cannot write the kernel cache {self.root} ({error.strerror or error}); "
                f"using {fallback}. Set FLASH_ATTENTION_CACHE_DIR to a folder that can be written."
            )
            return fallback
        return self.root

    def _roots(self) -> list[Path]:
        # An earlier process may have fallen back, so the private folder is read wherever there is one.
        private = _private_folders or [folder for folder in [_default_private_folder()] if _only_ours(folder)]
        return [self.root, *private, PREBUILT]


# ---------------------------------------------------------------- one artifact
def _read(folder: Path) -> Artifact | None:
    try:
        facts = json.loads((folder / FACTS_FILE).read_bytes())
        path = folder / facts["file"]
        if path.stat().st_size == facts["size"] and _sha256(path) == facts["sha256"]:
            return Artifact(path, facts)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, half gone, or not what was written: to be made again
    return None


def _make(root: Path, kind: str, key: str, make: Make) -> Artifact:
    place = root / kind / key
    with _unfinished(root, key) as folder:
        name, facts = make(folder)
        facts |= {"file": name, "size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
        (folder / FACTS_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        place.parent.mkdir(parents=True, exist_ok=True)
        if _read(place) is None:  # nothing there, or damaged
            with _unfinished(root, f"{key}-damaged") as trash:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(place, trash / key)
                with contextlib.suppress(OSError):  # another maker was first: the contents are the same
                    os.rename(folder, place)
    artifact = _read(place)
    if artifact is None:
        raise OSError(f"the kernel cache lost {place} right after it was written; is the disk full?")
    return Artifact(artifact.path, artifact.facts, made_now=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _unfinished(root: Path, name: str) -> Iterator[Path]:
    """A folder to work in, on the file system of ``root``; removed afterwards unless it was renamed."""
    parent = root / "tmp"
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Removes what processes that were killed left behind."""
    for folder in parent.iterdir():
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds the lock of one key. Goes on without it where it can't be had: see the module's docstring."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, timeout=LOCK_TIMEOUT_S)
    held = contextlib.ExitStack()
    # NotImplementedError: the file system has no locks, as some network mounts.
    with contextlib.suppress(filelock.Timeout, NotImplementedError, OSError):
        held.enter_context(lock)
    with held:
        yield


# ---------------------------------------------------------------- where it can be written
_private_folders: list[Path] = []  # the fall-back folder, once this process needed it
_said: set[str] = set()


def _check_writable(root: Path) -> None:
    """Raises OSError where files can't be made below ``root``. Permission bits alone don't tell (read-only
    mounts, quotas, the superuser), so a file is made."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root):
        pass


def _private_folder() -> Path:
    """A folder of the temporary directory that only this user can write to.

    Libraries are loaded from it, so one that somebody else could have put there is not trusted.
    """
    if not _private_folders:
        folder = _default_private_folder()
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700)
        if not _only_ours(folder):
            folder = Path(tempfile.mkdtemp(prefix="flash_attention_kernels_"))
        _private_folders.append(folder)
    return _private_folders[0]


def _default_private_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"flash_attention_kernels_{os.getuid()}"


def _only_ours(folder: Path) -> bool:
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and stat.S_IMODE(facts.st_mode) == 0o700
    )


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr)
