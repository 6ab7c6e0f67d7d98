"""The folder for files that are kept between runs and can be made again."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/radixkv`, or else `~/.cache/radixkv`. It need not exist.

    A user without a home, such as a number that only a container knows, has an empty folder that no other user can
    write to, and that is removed when the process ends.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "radixkv"
    try:
        return Path("~/.cache").expanduser() / "radixkv"
    except RuntimeError:  # there is no $HOME, and the user is in no list
        return temporary_cache_directory()


@cache
def temporary_cache_directory() -> Path:
    """Return a folder of this process that no other user can write to. It is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="radixkv-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
