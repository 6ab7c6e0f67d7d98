"""Checks that other users can neither write to a directory nor replace it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from radixkv.errors import ConfigError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def require_private(directory: Path) -> None:
    """Refuse a directory in which another user can change files, according to owners and modes.

    The directory and the files in it must belong to this user, and its parents to this user or root; other users must
    not be able to write, and the files must not be symbolic links. A parent with the sticky bit, such as /tmp, is
    accepted, because users cannot rename files of others there. Paths that do not exist are not checked.

    Raises:
        ConfigError: the message names the path, and what to do.
    """
    try:
        unsafe = next(_unsafe_paths(directory.resolve()), None)
    except OSError:  # opening the directory will fail with its own message
        return
    if unsafe is not None:
        path, status = unsafe
        raise ConfigError(
            f"tiers.disk_path: expected a directory that only user {os.geteuid()} can write, got {path} of user "
            f"{status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}; set tiers.secret_file, so that blocks that "
            "others have modified are not used, change the owner and the mode, or, if no other user can write there, "
            "set tiers.trusted"
        )


def _unsafe_paths(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Iterate over paths that other users can change: parents, the directory, and its contents."""
    user = os.geteuid()
    for path in reversed(directory.parents):
        if path.is_dir():
            status = path.stat()
            is_writable_by_others = status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX
            if status.st_uid not in (0, user) or is_writable_by_others:
                yield path, status
    if directory.is_dir():
        for path in (directory, *directory.iterdir()):
            status = path.lstat()
            if status.st_uid != user or stat.S_ISLNK(status.st_mode) or status.st_mode & _WRITABLE_BY_OTHERS:
                yield path, status
