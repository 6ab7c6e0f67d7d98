"""Checks whether other users can read or write the files with secrets that a configuration names."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

from radixkv.config import Config
from radixkv.errors import ConfigError

_log = logging.getLogger(__name__)


def require_secret_files(config: Config) -> None:
    """Refuse files with secrets that every user can write, and log a warning for those that every user can read.

    Readable files are not refused, because Kubernetes mounts secrets with the mode 0644 in containers with one user.
    The contents of the files are not read.

    Raises:
        ConfigError: the message names the key and the path.
    """
    for key, path in _secret_files(config):
        try:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
        except (OSError, ValueError):  # reading the file fails later, with a message that names the key
            continue
        if mode & stat.S_IWOTH:
            raise ConfigError(
                f"{key}: expected a file that other users can't write, got {path} with mode {mode:04o}; run chmod 600"
            )
        if mode & stat.S_IROTH:
            _log.warning("%s: every user of this machine can read %s (mode %04o); run chmod 600", key, path, mode)


def _secret_files(config: Config) -> Iterator[tuple[str, str]]:
    """Iterate over the keys that name files with secrets, and their paths."""
    files = {
        "server.tls_key": config.server.tls_key,
        "events.curve_key_file": config.events.curve_key_file,
        "tiers.secret_file": config.tiers.secret_file,
        "tiers.encryption_key_file": config.tiers.encryption_key_file,
        **{f"kv_sources.{name}.token_file": source.token_file for name, source in config.kv_sources.items()},
    }
    yield from ((key, path) for key, path in files.items() if path is not None)
