"""The directory for files that are kept between runs and can be recreated at any time."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/radixkv`, or `~/.cache/radixkv` if the variable is not an absolute path.

    For a user without a home directory, such as a bare user id in a container, return `temporary_cache_directory()`.
    The directory may not exist yet.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "radixkv"
    try:
        return Path("~/.cache").expanduser() / "radixkv"
    except RuntimeError:  # $HOME is not set, and the user is not in the password database
        return temporary_cache_directory()


@cache
def temporary_cache_directory() -> Path:
    """Return a private directory of this process, which is removed when the process exits."""
    folder = tempfile.mkdtemp(prefix="radixkv-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
