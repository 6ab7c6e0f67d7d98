"""Whether other users can write to a directory, or put another one in its place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from radixkv.errors import ConfigError

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def require_private(directory: Path) -> None:
    """Refuse a directory in which another user can change files, as far as owners and modes say.

    The directory and the files in it must belong to this user, and its parents to this user or root; others must not
    be able to write. A parent with the sticky bit, such as /tmp, is accepted, because others can't rename what is not
    theirs. What does not exist is not checked.

    Raises:
        ConfigError: the message names the path, and what to do.
    """
    try:
        found = next(_of_others(directory.resolve()), None)
    except OSError:  # opening it fails with a message of its own
        return
    if found is not None:
        path, status = found
        raise ConfigError(
            f"tiers.disk_path: expected a directory that only user {os.geteuid()} can write, got {path} of user "
            f"{status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}; set tiers.secret_file, so that blocks that "
            "others have modified are not used, change the owner and the mode, or, if nobody else can write there, set "
            "tiers.trusted"
        )


def _of_others(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Iterate over what other users can change: parents, the directory, and what is in it."""
    user = os.geteuid()
    for path in reversed(directory.parents):
        if path.is_dir():
            status = path.stat()
            is_open = status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX
            if status.st_uid not in (0, user) or is_open:
                yield path, status
    if directory.is_dir():
        for path in (directory, *directory.iterdir()):
            status = path.lstat()
            if status.st_uid != user or stat.S_ISLNK(status.st_mode) or status.st_mode & _WRITABLE_BY_OTHERS:
                yield path, status
