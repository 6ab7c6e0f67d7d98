"""Creates directories atomically, with their contents."""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory, which is renamed to `target` at the end of the `with` block, or removed after an error.

    Args:
        target: must not exist, unless it is an empty directory. Its parent is created.

    Raises:
        FileExistsError: the target exists. Another process may have created it during the block.
        OSError: the directory can't be created.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # File systems allow 255 bytes per name, and a character takes up to 4 bytes.
    directory = target.parent / f".{target.name[:50]}.{secrets.token_hex(8)}"
    directory.mkdir()
    try:
        yield directory
        directory.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and target.exists():
            raise FileExistsError(errno.EEXIST, "File exists", str(target)) from error
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
