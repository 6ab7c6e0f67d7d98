"""Refuses a configuration whose files, packages or addresses can't be used, before a model is loaded.

Nothing here imports torch.
"""

from __future__ import annotations

import logging
import stat
from pathlib import Path

from radixkv.config import Config, TiersConfig
from radixkv.config.address import host_and_port
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError, InvalidAdapter
from radixkv.model.adapters.adapter_config import require_files
from radixkv.offload.tiers.open_store import require_backend, require_redis_url
from radixkv.offload.tiers.private_directory import require_private
from radixkv.startup.tier_secrets import ciphers_of, has_protection, secret_of

_log = logging.getLogger(__name__)


def require_usable(config: Config) -> None:
    """Check the directories, files and packages that an engine needs on this machine in addition to the model.

    Other machines are not checked, since the engine starts without them.

    Raises:
        ConfigError: the message names the key.
    """
    _require_adapter_directory(config)
    for name, section in config.adapters.items():
        try:
            require_files(Path(section.path))
        except InvalidAdapter as error:
            raise ConfigError(f"adapters.{name}.path: {error}") from error
    _require_tiers(config.tiers)
    for name in config.stores:
        require_backend(name)
    require_protected(config)


def require_protected(config: Config) -> None:
    """Refuse stores and servers whose K/V others could modify, because it is neither authenticated nor encrypted.

    Raises:
        ConfigError: the message names the key, and the key that declares a store or a server trusted.
    """
    tiers = config.tiers
    unprotected: dict[str, bool] = {}  # by key, whether the configuration declares the store or server trusted
    if tiers.secret_file is None:  # `encryption_key_file` does not protect K/V that servers send to each other
        unprotected |= {f"kv_sources.{name}": source.trusted for name, source in config.kv_sources.items()}
    if not has_protection(tiers):
        unprotected |= {f"stores.{name}": store.trusted for name, store in config.stores.items()}
        addresses = {"tiers.redis_url": tiers.redis_url, "tiers.mooncake_master": tiers.mooncake_master}
        unprotected |= {key: tiers.trusted for key, address in addresses.items() if address is not None}
    for key, is_trusted in unprotected.items():
        if not is_trusted:
            section = "tiers" if key.startswith("tiers.") else key
            raise ConfigError(
                f"{key}: expected tiers.secret_file, so that K/V that others have modified is not used, got none; use "
                f"the same secret on all servers, or set {section}.trusted if no one else can modify it"
            )


def require_secret_files(config: Config) -> None:
    """Refuse files with secrets that every user can write, and log a warning for those that every user can read.

    Readable files are not refused, because Kubernetes mounts secrets with the mode 0644 in containers with one user.
    The contents of the files are not read.

    Raises:
        ConfigError: the message names the key and the path.
    """
    files = {
        "server.tls_key": config.server.tls_key,
        "events.curve_key_file": config.events.curve_key_file,
        "tiers.secret_file": config.tiers.secret_file,
        "tiers.encryption_key_file": config.tiers.encryption_key_file,
        **{f"kv_sources.{name}.token_file": source.token_file for name, source in config.kv_sources.items()},
    }
    for key, path in files.items():
        if path is None:
            continue
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


def _require_adapter_directory(config: Config) -> None:
    """Refuse a `model.adapter_directory` that does not exist, or that is set although adapters are off."""
    directory = config.model.adapter_directory
    if directory and not Path(directory).is_dir():
        raise ConfigError(f"model.adapter_directory: expected a directory, got {directory!r}")
    if directory and not config.max_adapters:
        raise ConfigError("model.max_adapters: expected at least 1 with model.adapter_directory, got 0")


def _require_tiers(tiers: TiersConfig) -> None:
    if tiers.disk_path is None and tiers.disk_bytes is not None:
        raise ConfigError("tiers.disk_path: expected a directory with tiers.disk_bytes, got none")
    if tiers.disk_path == "":  # an empty path is the working directory
        raise ConfigError("tiers.disk_path: expected a directory, got an empty path")
    if secret_of(tiers):
        require_package("tiers.secret_file", "cryptography", "cryptography", "encryption")
    ciphers_of(tiers)  # refuses an invalid key or a missing package
    if tiers.redis_url is not None:
        require_redis_url(tiers.redis_url)
    if tiers.mooncake_master is not None:
        host_and_port("tiers.mooncake_master", tiers.mooncake_master)
        require_backend("mooncake")
    if tiers.disk_path is not None and not (tiers.trusted or has_protection(tiers)):
        require_private(Path(tiers.disk_path))
