"""The folder that the library keeps in a cache folder, and how files come into it and go.

Everything that the library writes, reads and deletes in a cache folder lies in one subfolder with a name of
its own, ``STORE``. It is made for this user alone, and left alone where it is a link or others can write to
it. What else the cache folder holds is the user's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from flash_helpers.trust import make_private_folders, untrusted_entry_reason, untrusted_reason

STORE = "flash_attention_store-2"
"""Earlier versions wrote into the cache folder itself: their files are neither read nor removed."""

LOCK_TIMEOUT_S = 900.0  # a maker that takes longer than this is stuck: make the artifact beside it
_ABANDONED_S = 24 * 3600.0  # age at which another process' unfinished folder is swept away
_ATTEMPTS = 5
_WORK, _LOCKS = "tmp", "locks"


class NotOursError(OSError):
    """A folder that the library would use was made by somebody else, or may be written by others."""


def check_writable(root: Path) -> None:
    """Makes the store of a cache folder where there is none.

    Raises:
        OSError: nothing can be written there. Permission bits alone don't tell (read-only mounts, quotas, the
            superuser), so a file is made.
        NotOursError: others could change what is there.
    """
    for attempt in range(_ATTEMPTS):
        try:
            make_private_folders(root)
            if reason := untrusted_reason(root / STORE):  # nothing is made in a folder that is not used
                raise NotOursError(reason)
            store = own_folder(root / STORE)
            if reason := untrusted_reason(store):
                raise NotOursError(reason)
            with tempfile.TemporaryFile(dir=store) as file:
                file.write(b"0")  # a full disk makes empty files
            return
        except FileNotFoundError:  # somebody removes it meanwhile
            if attempt == _ATTEMPTS - 1:
                raise


def own_folder(folder: Path) -> Path:
    """Makes a folder of the store, or checks that the one there is the library's.

    Raises:
        NotOursError: a link, a file, or a folder that others can write is there.
        OSError: it can't be made.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if stat.S_ISREG(facts.st_mode) and STORE in folder.parent.parts:  # damage, in a store of ours
        folder.unlink()
        folder.mkdir(mode=0o700)
        facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise NotOursError(f"{folder} is {'a link' if stat.S_ISLNK(facts.st_mode) else 'no folder'}")
    if reason := untrusted_entry_reason(folder, facts):
        raise NotOursError(reason)
    return folder


@contextlib.contextmanager
def unfinished(store: Path, name: str) -> Iterator[Path]:
    """A folder to work in, on the file system of the store; removed afterwards unless it was renamed."""
    parent = own_folder(store / _WORK)
    sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=parent))
    with _in_use(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path, older_than: float = _ABANDONED_S) -> int:
    """Removes what killed processes left in a folder of unfinished work.

    Args:
        parent: the folder.
        older_than: age in seconds; what is younger stays, and whatever a running process works in.

    Returns:
        The number of folders that stay because a process works in them.
    """
    in_use = 0
    for entry in parent.iterdir():
        with contextlib.suppress(OSError):
            facts = entry.lstat()
            if time.time() - facts.st_mtime < older_than:
                continue
            if not stat.S_ISDIR(facts.st_mode):
                entry.unlink()  # a link goes, what it points to stays
            elif _is_in_use(entry):
                in_use += 1
            else:
                shutil.rmtree(entry, ignore_errors=True)
    return in_use


@contextlib.contextmanager
def locked(store: Path, name: str) -> Iterator[None]:
    """Holds the lock of one artifact. Goes on without it where it can't be had: see ``cache``."""
    lock = filelock.FileLock(own_folder(store / _LOCKS) / f"{name}.lock", timeout=LOCK_TIMEOUT_S)
    held = contextlib.ExitStack()
    # NotImplementedError: the file system has no locks, as some network mounts.
    with contextlib.suppress(filelock.Timeout, NotImplementedError, OSError):
        held.enter_context(lock)
    with held:
        yield


def remove_part(store: Path, part: str) -> int:
    """Removes one folder of the store; of unfinished work only what no running process works in.

    Returns:
        The number of unfinished folders that a running process works in, which stay.

    Raises:
        NotOursError: a link or something else that the library did not make is there; it stays.
        OSError: it can't be removed.
    """
    folder = store / part
    try:
        folder.lstat()
    except FileNotFoundError:
        return 0
    own_folder(store)
    own_folder(folder)
    if part == _WORK:
        in_use = sweep(folder, older_than=0.0)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return in_use
    try:
        with unfinished(store, part) as trash:  # readers see all of it or nothing
            os.rename(folder, trash / part)
            shutil.rmtree(trash / part)
    except OSError:  # a full disk has no room for another folder
        if os.path.lexists(folder):
            shutil.rmtree(own_folder(folder))
    return 0


@contextlib.contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Says that this process works in a folder, by a lock that dies with it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _is_in_use(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False
