"""The folder for files that are kept between runs and can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return `$XDG_CACHE_HOME/radixkv`, or else `~/.cache/radixkv`. It need not exist."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "radixkv"
