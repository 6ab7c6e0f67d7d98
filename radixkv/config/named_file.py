"""Reads the files that keys of a configuration name."""

from __future__ import annotations

from pathlib import Path

from radixkv.errors import ConfigError


def read_named(key: str, path: str | Path) -> bytes:
    """Read a file that a key names.

    Args:
        key: for the message.
        path: as it was given; a relative one begins in the directory of the process.

    Raises:
        ConfigError: it can't be read. The message names the key and the path, and nothing of what is in the file.
    """
    if not str(path):  # which would be read as the directory itself
        raise ConfigError(f"{key}: expected a readable file, got an empty path")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: expected a readable file, got {path}: {error.strerror}") from error
    except ValueError as error:  # a zero byte
        raise ConfigError(f"{key}: expected a readable file, got {str(path)!r}, which is no path") from error
