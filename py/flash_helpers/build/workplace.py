"""The folder that nvcc runs in.

nvcc hands its steps to a shell as text: ``$(…)`` in a path that it is given is executed, and quotes, ``$``
and backslashes break the call. It also resolves its sources to their real path, so that relative names are
not enough. Therefore it runs in a folder with a plain real path, names only files of that folder, finds
headers and libraries through links in it, and keeps its temporary files there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from flash_helpers.build.errors import BuildError
from flash_helpers.trust import untrusted_reason

_PLAIN = re.compile(r"[A-Za-z0-9/._+@=-]+")
# Inside double quotes, as nvcc's own profile writes them, a shell leaves everything but these as it is.
_NOT_QUOTABLE = re.compile(r'[$`"\\\n]')
_USUAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class NoPlainFolderError(BuildError):
    """No folder that can be written has a path that nvcc can be given."""


def is_plain(path: Path) -> bool:
    """Whether a path, and what its links lead to, means the same to a shell as it is written."""
    return all(_PLAIN.fullmatch(str(form)) for form in (path, os.path.realpath(path)))


def not_quotable(path: Path) -> str | None:
    """The first character of a program's path that a shell changes even in quotes, or None."""
    match = _NOT_QUOTABLE.search(str(path)) or _NOT_QUOTABLE.search(os.path.realpath(path))
    return match[0] if match else None


@contextlib.contextmanager
def workplace(folder: Path, links: Mapping[str, Path]) -> Iterator[Path]:
    """An empty folder for nvcc to run in, removed afterwards.

    Args:
        folder: where it is made if the path is plain; else it is made among the temporary folders.
        links: names in it, and the folders that they lead to.

    Raises:
        NoPlainFolderError: no folder that can be written has a plain path.
    """
    with tempfile.TemporaryDirectory(
        dir=_plain_parent(folder), prefix="nvcc-", ignore_cleanup_errors=True
    ) as made:
        place = Path(made)
        for name, target in links.items():
            (place / name).symlink_to(target.absolute(), target_is_directory=True)
        yield place


def bring(source: Path, target: Path) -> None:
    """Makes ``target`` the same file as ``source``, or a copy where they lie on different disks.

    Raises:
        FileNotFoundError: ``source`` is gone.
    """
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or a file system or kernel that forbids it
        shutil.copyfile(source, target)


def _plain_parent(folder: Path) -> Path:
    tried = dict.fromkeys([folder, Path(tempfile.gettempdir()), *map(Path, _USUAL_FOLDERS)])
    for candidate in tried:
        # Whoever can rename a new folder in it could put other output in its place.
        trusted = untrusted_reason(candidate / "new") is None
        if is_plain(candidate) and os.access(candidate, os.W_OK | os.X_OK) and trusted:
            return candidate.resolve()
    names = ", ".join(repr(str(candidate)) for candidate in tried)
    raise NoPlainFolderError(
        f"nvcc can't be run: it gives paths to a shell unquoted. Of {names} none can be written by this user "
        "alone and has a path of ASCII letters, digits and / . _ + @ = - only. Set TMPDIR to such a folder"
    )
