"""Refuses configurations that cannot be served, before PyTorch is imported and a model is loaded."""

from __future__ import annotations

from radixkv.config import Config
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError
from radixkv.service.server.auth.requirements import require_secure
from radixkv.service.server.event_publishing import require_publishable
from radixkv.service.server.listen_address import require_free
from radixkv.service.server.open_files import raise_open_file_limit
from radixkv.service.server.servicers.kv_sources import require_sources
from radixkv.startup.requirements import require_secret_files, require_usable
from radixkv.telemetry.otlp import require_exportable


def require_startable(config: Config) -> None:
    """Check everything that a server needs from its configuration and this machine, except the model.

    The limit of open files is raised if `server.max_connections` needs it.

    Raises:
        ConfigError: the message names the key.
    """
    require_secure(config.server)
    if config.server.http_port is not None:
        require_package("server.http_port", "aiohttp", "aiohttp", "http")
        require_package("server.http_port", "orjson", "orjson", "http")
    raise_open_file_limit(config.server)
    require_free(config.server)
    require_publishable(
        config.events, is_insecure=config.server.insecure, has_tokens=config.server.tokens_file is not None
    )
    require_role(config)
    require_sources(config.kv_sources)
    require_usable(config)
    require_secret_files(config)
    require_exportable(config.telemetry)


def require_role(config: Config) -> None:
    """Refuse a value of `transfer.role` that contradicts the rest of the configuration.

    Raises:
        ConfigError: the message names the key.
    """
    role = config.transfer.role
    if role == "decode" and not config.kv_sources:
        raise ConfigError(f"transfer.role: the role {role} requires a section kv_sources to fetch from")
    if role == "prefill" and config.gateway.enabled:
        raise ConfigError(f"transfer.role: the role {role} requires gateway.enabled=false, because gateways generate")
