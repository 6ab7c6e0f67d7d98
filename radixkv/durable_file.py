"""Replaces small files so that neither a killed process nor a power failure leaves half of one."""

from __future__ import annotations

import os
from pathlib import Path


def replace_file(path: Path, contents: bytes) -> None:
    """Replace a file atomically and durably; if it does not exist, create it. Only the current user can read it.

    The new contents are first written to a file next to it with the suffix `.partial`.

    Raises:
        OSError: the file cannot be written. The former one is unchanged, unless only the last step failed: making the
            replacement durable.
    """
    partial = path.with_suffix(".partial")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
