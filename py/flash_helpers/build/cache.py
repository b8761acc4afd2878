"""The content-addressed cache of compiled output.

An artifact is a folder ``<kind>/<key>/`` of a store with one file and ``facts.json`` (the file's name,
size and SHA-256, and whatever the maker wants to remember, under a digest of its own). The key names
everything that the file depends on, so an artifact is never updated: it is there and right, or it is not.

- Published by renaming a finished folder into place: no reader sees half a file.
- One maker at a time for each key, by an operating system lock that dies with its process. Readers
  take no lock. Correctness does not rest on the lock: two makers would rename equal contents.
- Read with size and digest checked: a damaged artifact counts as missing and is made again.
- Read only from a store that nobody else can write (``trust``): what is in it becomes code of this process.
- Libraries that came with the package (``flash_helpers/prebuilt``) are found as if they were in the cache;
  they are trusted as the package's own code is.
- Where the folder cannot be used, a private folder in the temporary directory is used instead.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from flash_helpers import environment
from flash_helpers.build import store as stores
from flash_helpers.build.errors import BuildError, KernelCacheError
from flash_helpers.build.private_folder import (
    NO_ROOM,
    OTHER_FOLDER,
    no_room,
    private_folder,
    readable_private_folders,
)
from flash_helpers.build.store import STORE
from flash_helpers.content import ContentError, read_text, seal, unseal
from flash_helpers.messages import say_once
from flash_helpers.trust import own_file_reason, untrusted_reason

FACTS_FILE = "facts.json"
PREBUILT = Path(__file__).resolve().parents[1] / "prebuilt"  # what a wheel brought; read, never written
MAX_FACTS = 16 << 20  # bytes of facts.json, most of them the compiler's output
MAX_TEXT = 64 << 10  # bytes of a small file
_ATTEMPTS = 5  # attempts to make an artifact whose folder another process removes meanwhile
T = TypeVar("T")


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
        root: the folder, of which only the subfolder ``store`` is used; ``None`` takes
            ``environment.cache_dir()``. Both are made when first written to.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or environment.cache_dir()
        self.store = self.root / STORE

    def get(self, kind: str, key: str) -> Artifact | None:
        """The artifact, verified; ``None`` where it is missing or damaged."""
        for store in self.readable_stores():
            if artifact := _read(store, kind, key):
                return artifact
        return None

    def get_or_make(self, kind: str, key: str, make: Make) -> Artifact:
        """The artifact. This process makes it, unless another one is already making it.

        Args:
            kind: ``objects`` or ``libraries``.
            key: digest of everything that it is made of.
            make: writes the files into the folder that it is given; called where the artifact is missing.

        Raises:
            KernelCacheError: neither the cache folder nor the temporary directory can be written, the disk is
                full, or the folder is removed again and again.
        """
        if artifact := self.get(kind, key):
            return artifact
        store = self.writable_root() / STORE

        def get_or_make() -> Artifact:
            with stores.locked(store, f"{kind}-{key}"):
                return self.get(kind, key) or _make(store, kind, key, make)

        return _write(store, get_or_make)

    def write_text(self, name: str, text: str) -> Path:
        """Writes a small file of the store, atomically: readers see the old text or the new.

        Raises:
            KernelCacheError: as ``get_or_make``.
        """
        store = self.writable_root() / STORE
        path = store / name

        def write() -> Path:
            for folder in reversed(path.relative_to(store).parents[:-1]):
                stores.own_folder(store / folder)
            with stores.unfinished(store, path.name) as folder:
                (folder / path.name).write_text(text, encoding="utf-8")
                if path.is_dir() and not path.is_symlink():  # damage: nothing of the library's
                    os.rename(path, folder / f"{path.name}-damaged")
                os.replace(folder / path.name, path)
            return path

        return _write(store, write)

    def read_texts(self, folder: str, pattern: str) -> list[str]:
        """The small files of one folder of the store whose name matches ``pattern``."""
        texts = []
        for store in self.readable_stores():
            for path in sorted((store / folder).glob(pattern)):
                if store != PREBUILT and own_file_reason(store, path):
                    continue
                with contextlib.suppress(OSError, ContentError):
                    texts.append(read_text(path, MAX_TEXT))
        return texts

    def writable_root(self) -> Path:
        """The folder that new artifacts go to: ``root``, or the private one where it can't be used.

        Raises:
            KernelCacheError: the private one can't be used either.
        """
        try:
            stores.check_writable(self.root)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise no_room(self.root) from error
            fallback = private_folder()
            say_once(
                f"cannot write the kernel cache {self.root} ({error.strerror or error}); "
                f"using {fallback}. S{OTHER_FOLDER[1:]} of yours that can be written."
            )
            return fallback
        return self.root

    def readable_stores(self) -> list[Path]:
        """The folders that artifacts are read from, all of which nobody else can write."""
        # An earlier process may have fallen back, so the private folder is read wherever there is one.
        found = []
        for root in dict.fromkeys([self.root, *readable_private_folders()]):
            store = root / STORE
            if reason := _unusable_reason(store):
                say_once(
                    f"no kernel is loaded from {store}: {reason}. Remove it, or forbid others to write there "
                    f"(chmod go-w), or {OTHER_FOLDER} of yours"
                )
            else:
                found.append(store)
        return [*found, PREBUILT]


# ---------------------------------------------------------------- one artifact
class _RemovedError(Exception):
    """The folder that an artifact was made in is gone."""


def _read(store: Path, kind: str, key: str) -> Artifact | None:
    """The artifact of a store, if it is what was written, and only we can have written it."""
    ours = store != PREBUILT
    folder = store / kind / key
    try:
        if ours and own_file_reason(store, folder / FACTS_FILE):
            return None
        facts = unseal(read_text(folder / FACTS_FILE, MAX_FACTS))
        path = folder / facts["file"]
        if path.parent != folder or not path.is_file() or (ours and own_file_reason(store, path)):
            return None
        if path.stat().st_size == facts["size"] and _sha256(path) == facts["sha256"]:
            return Artifact(path, facts)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, half gone, or not what was written: to be made again
    return None


def _make(store: Path, kind: str, key: str, make: Make) -> Artifact:
    place = stores.own_folder(store / kind) / key
    with stores.unfinished(store, key) as folder:
        try:
            name, facts = make(folder)
            facts |= {"file": name, "size": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
            (folder / FACTS_FILE).write_text(seal(facts), encoding="utf-8")
            for file in (folder / name, folder / FACTS_FILE):
                file.chmod(file.stat().st_mode & ~0o022)  # whatever the umask says
            stores.own_folder(store / kind)
            if _read(store, kind, key) is None:  # nothing there, or damaged
                with stores.unfinished(store, f"{key}-damaged") as trash:
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(place, trash / key)
                    try:
                        os.rename(folder, place)
                    except OSError as error:
                        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                            raise
                        # Another maker was first: the contents are the same.
        except (OSError, BuildError) as error:
            if not folder.exists() and _read(store, kind, key) is None:
                raise _RemovedError from error
            raise
    artifact = _read(store, kind, key)
    if artifact is None:
        raise _RemovedError
    return Artifact(artifact.path, artifact.facts, made_now=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# ---------------------------------------------------------------- what goes wrong with folders
def _write(store: Path, action: Callable[[], T]) -> T:
    """Does ``action``, which writes into a store; once more where somebody removes the store meanwhile."""
    try:
        for _ in range(_ATTEMPTS):
            try:
                return action()
            except _RemovedError:
                pass
            except FileNotFoundError as error:
                if not str(error.filename).startswith(str(store)):
                    raise
            stores.check_writable(store.parent)
    except KernelCacheError:
        raise
    except OSError as error:
        if error.errno in NO_ROOM:
            raise no_room(store) from error
        raise KernelCacheError(
            f"the kernel cache {store} can't be used: {error}; {OTHER_FOLDER} of yours that can be written"
        ) from error
    raise KernelCacheError(
        f"the kernel cache {store} was removed {_ATTEMPTS} times while a kernel was compiled into it; "
        f"compile again when nothing clears it, or {OTHER_FOLDER} that nothing else clears"
    )


def _unusable_reason(store: Path) -> str | None:
    if store.is_symlink():
        return "it is a link"
    return untrusted_reason(store)
