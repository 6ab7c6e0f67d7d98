"""Refuses configurations that would serve unauthenticated callers by accident, before a model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from radixkv.config import ServerConfig
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError
from radixkv.service.client.address import is_loopback
from radixkv.service.server.auth.server_auth import ServerAuth

# Docker creates the first file in each container, Podman the second one.
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))

_logger = logging.getLogger(__name__)


def require_secure(config: ServerConfig, container_marks: Sequence[Path] = _CONTAINER_MARKS) -> None:
    """Refuse addresses that other machines could reach without a credential, and read all files once.

    ```
                          no TLS               TLS                    TLS and tokens_file
    loopback              open to all users    open to all users      credentials
    network               refused              refused                credentials
    network, insecure     open to all, logged  open to all, logged    credentials
    ```

    Tokens without TLS are refused as well, unless `insecure` says that a proxy terminates TLS.

    Args:
        config: the addresses and credentials of the service.
        container_marks: files. If one of them exists, the process runs in a container, whose loopback interface cannot
            be reached from outside, and the log warns about it.

    Raises:
        ConfigError: the message names the key.
    """
    _require_dependencies(config)
    has_credentials = config.tokens_file is not None
    if has_credentials and config.tls_certificate is None and not config.insecure:
        raise ConfigError(
            "server.tokens_file: requires server.tls_certificate, or --insecure behind a proxy that terminates TLS"
        )
    if not is_loopback(config.host) and not has_credentials:
        if not config.insecure:
            raise ConfigError(
                "server.host: expected 127.0.0.1, ::1 or localhost without server.tokens_file and "
                f"server.tls_certificate, got {config.host!r}; --insecure serves anyone who can reach it"
            )
        _logger.warning("anyone who can reach %s may make every call: there are no credentials", config.host)
    if is_loopback(config.host) and any(mark.exists() for mark in container_marks):
        _logger.warning(
            "listening on %s of this container, which its published ports do not reach; to accept connections from "
            "outside, configure TLS and tokens, or publish the ports to 127.0.0.1 of the host only and add --host "
            "0.0.0.0 --insecure",
            config.host,
        )
    ServerAuth(config)  # reads all files, and raises if one cannot be used


def _require_dependencies(config: ServerConfig) -> None:
    """Refuse keys without the keys that they require."""
    if (config.tls_certificate is None) is not (config.tls_key is None):
        raise ConfigError("server.tls_certificate, tls_key: each requires the other")
    if config.client_ca is not None and config.tls_certificate is None:
        raise ConfigError("server.client_ca: requires server.tls_certificate")
    if config.client_ca is not None and config.tokens_file is None:
        raise ConfigError("server.client_ca: requires server.tokens_file, which maps certificates to callers")
    if config.client_ca is not None:
        require_package("server.client_ca", "cryptography", "cryptography", "encryption")
