"""Reads files whose paths are in the configuration."""

from __future__ import annotations

from pathlib import Path

from radixkv.config.regular_file import read_regular
from radixkv.errors import ConfigError

# Files with certificates, tokens or keys are much smaller than this.
_MAX_BYTES = 16 * 2**20


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
        return read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"{key}: expected a readable file, got {path}: {error.strerror}") from error
    except ValueError as error:  # the path has a zero byte
        raise ConfigError(f"{key}: expected a readable file, got the invalid path {str(path)!r}") from error
