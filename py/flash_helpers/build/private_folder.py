"""Where compiled kernels go when the cache folder can't be used, and the error for a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

from flash_helpers.build import store
from flash_helpers.build.errors import KernelCacheError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of OSErrors that a full disk, a full quota and a limit of the file size raise."""

OTHER_FOLDER = "set FLASH_ATTENTION_CACHE_DIR to a folder"

_folders: list[Path] = []  # the private folder, once this process needed it


def private_folder() -> Path:
    """A folder of the temporary directory that only this user can write to.

    Libraries are loaded from it, so one that somebody else could have put there is not trusted.
    """
    folder = _folders[0] if _folders else _default_folder()
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    try:
        if not _only_ours(folder):
            folder = Path(tempfile.mkdtemp(prefix="flash_attention_kernels_"))
        store.check_writable(folder)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise no_room(folder) from error
        raise KernelCacheError(
            f"neither the kernel cache nor the temporary folder {folder.parent} can be used ({error}); "
            f"{OTHER_FOLDER} of yours that can be written"
        ) from error
    _folders[:] = [folder]
    return folder


def readable_private_folders() -> list[Path]:
    """Private folders of this process or an earlier one that nobody else can write to."""
    return _folders or [folder for folder in [_default_folder()] if _only_ours(folder)]


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"flash_attention_kernels_{os.getuid()}"


def _only_ours(folder: Path) -> bool:
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and stat.S_IMODE(facts.st_mode) == 0o700
    )


def no_room(folder: Path) -> KernelCacheError:
    """What to raise where a disk has no room for a compiled kernel."""
    room = ""
    with contextlib.suppress(OSError):
        nearest = next(f for f in (folder, *folder.parents) if f.exists())
        room = (
            f": {shutil.disk_usage(nearest).free:,} bytes are free, and a quota or a file size limit may hold"
        )
    return KernelCacheError(
        f"no room to compile a kernel in {folder}{room}. Free space (flash-attention cache clear removes "
        f"compiled kernels), or {OTHER_FOLDER} on another disk"
    )
