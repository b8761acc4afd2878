"""Places that a command is told to write to, looked at before its work begins."""

from __future__ import annotations

import os
from pathlib import Path

from flash_helpers.console.output import STDOUT


class NotWritableError(OSError):
    """A command cannot write where it was told to; nothing was done."""


def check_file(path: Path | None, option: str = "--json") -> None:
    """Refuses a file that can't be written.

    Args:
        path: the file, whose folders are made when it is written; None or ``-``: there is none.
        option: who names it, for the message.

    Raises:
        NotWritableError: it is a folder, lies below a file, or may not be written.
    """
    if path is None or path == STDOUT:
        return
    if os.path.isdir(path):
        raise NotWritableError(f"{option} is {path}, a folder; name a file, such as {path / 'result.json'}")
    if not os.path.exists(path.parent):
        check_folder(path.parent, option)
        return
    existed = os.path.lexists(path)
    try:
        # A pipe that nobody reads is refused rather than waited for.
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))
        if not existed:
            path.unlink()
    except OSError as error:
        raise NotWritableError(
            f"{option} is {path}, which can't be written: {error.strerror}; name another file"
        ) from error


def check_folder(path: Path, option: str) -> None:
    """Refuses a folder that can't be made or written to.

    Args:
        path: the folder, which need not be there yet.
        option: who names it, for the message.

    Raises:
        NotWritableError: a file stands in its way, or it may not be written to.
    """
    nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not os.path.isdir(nearest):
        raise NotWritableError(f"{option} is {path}, but {nearest} is no folder; name another place")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise NotWritableError(f"{option} is {path}, and {nearest} may not be written to; name another place")
