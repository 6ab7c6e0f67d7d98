"""Reads regular files, which may be replaced while the service runs. Refuses directories, FIFOs and devices at once."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from radixkv.errors import ConfigError

# Files with certificates, tokens or keys are much smaller than this.
_MAX_NAMED_BYTES = 16 * 2**20


def read_regular(path: str | Path, max_bytes: int | None = None) -> bytes:
    """Read a regular file, or the one that a symbolic link leads to.

    A FIFO or a device is refused, because reading it may never end; a socket cannot be opened. A regular file of a file
    system that does not respond, such as a mount whose server is gone, can still block: read it on a thread that
    nothing else needs.

    Args:
        path: the file.
        max_bytes: maximum size of the file; None for no maximum.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is too large. `strerror` gives the reason.
        ValueError: the path has a zero byte.
    """
    # With O_NONBLOCK, opening a FIFO does not wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            kind = "a FIFO" if stat.S_ISFIFO(mode) else "a device"
            raise OSError(errno.EINVAL, f"not a regular file but {kind}", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read() if max_bytes is None else file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(path))
    return content


def read_named(key: str, path: str | Path) -> bytes:
    """Read a file whose path is the value of a key.

    Args:
        key: name of the key, for the error message.
        path: value of the key; relative paths start at the working directory.

    Raises:
        ConfigError: the file cannot be read, is not a regular file, or has more than 16 MiB. The message names the key
            and the path, and nothing of the contents.
    """
    if not str(path):  # `Path` takes an empty path for the working directory
        raise ConfigError(f"{key}: expected a readable file, got an empty path")
    try:
        return read_regular(path, _MAX_NAMED_BYTES)
    except OSError as error:
        raise ConfigError(f"{key}: expected a readable file, got {path}: {error.strerror}") from error
    except ValueError as error:  # the path has a zero byte
        raise ConfigError(f"{key}: expected a readable file, got the invalid path {str(path)!r}") from error
