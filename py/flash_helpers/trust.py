"""Who may have written a file or a folder: code and choices are read only where nobody else could have."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

_MAX_LINKS = 40  # as many as the system follows


def untrusted_reason(path: Path) -> str | None:
    """Why somebody else may have written what lies at ``path``; None where only this user or root could.

    The path itself, each folder above it and each link on the way are looked at: whoever may write to a
    folder may replace what it holds. A sticky folder such as ``/tmp`` is safe to pass through, not to read
    from. What does not exist yet was written by nobody.

    Args:
        path: a file or a folder.
    """
    return _reason(path.absolute(), _MAX_LINKS)


def _reason(path: Path, links: int) -> str | None:
    if links == 0:
        return f"{path} is reached through too many links"
    for part in (*reversed(path.parents), path):
        try:
            facts = part.lstat()
        except OSError:
            return None
        if facts.st_uid not in (os.geteuid(), 0):
            return f"{part} belongs to {_user_name(facts.st_uid)}"
        if stat.S_ISLNK(facts.st_mode):
            if reason := _reason(part.parent / os.readlink(part), links - 1):
                return reason
        elif others_can_write(facts) and not (facts.st_mode & stat.S_ISVTX and part != path):
            return f"{part} can be written by others (mode {stat.S_IMODE(facts.st_mode):o})"
    return None


def others_can_write(facts: os.stat_result) -> bool:
    """Whether others than the owner may write to a file or folder. A group of this user alone is no other."""
    if facts.st_mode & stat.S_IWOTH:
        return True
    return bool(facts.st_mode & stat.S_IWGRP) and not _is_private_group(facts.st_gid)


def own_file_reason(store: Path, path: Path) -> str | None:
    """Why a file below a trusted folder is not trusted: a link on the way, no file, or written by others.

    Args:
        store: the trusted folder.
        path: the file.
    """
    below = path.relative_to(store).parts
    for depth in range(1, len(below) + 1):
        part = store.joinpath(*below[:depth])
        try:
            facts = part.lstat()
        except OSError as error:
            return f"{part}: {error.strerror}"
        is_right = stat.S_ISREG if depth == len(below) else stat.S_ISDIR
        if not is_right(facts.st_mode):
            return f"{part} is a link, or not what the library puts there"
        if reason := untrusted_entry_reason(part, facts):
            return reason
    return None


def untrusted_entry_reason(path: Path, facts: os.stat_result) -> str | None:
    """Why one entry of a trusted folder, with this ``lstat``, is not trusted."""
    if facts.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to {_user_name(facts.st_uid)}"
    if others_can_write(facts):
        return f"{path} can be written by others (mode {stat.S_IMODE(facts.st_mode):o})"
    return None


def make_private_folders(path: Path) -> None:
    """Makes a folder and those missing above it, for this user alone whatever the umask says."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises where a file is in the way


def _is_private_group(gid: int) -> bool:
    """Whether a group has this user as its one member, as many systems make one for each user."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return (group.gr_name, gid) == (user.pw_name, user.pw_gid) and set(group.gr_mem) <= {user.pw_name}


def _user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
