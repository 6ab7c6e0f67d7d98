"""The servers that K/V may be fetched from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from radixkv.config import KVSourceConfig
from radixkv.config.regular_file import read_named
from radixkv.errors import ConfigError, InvalidRequest, KVSourceUnusable
from radixkv.service.client.address import is_on_this_machine, require_address
from radixkv.service.client.async_client import AsyncClient
from radixkv.service.client.connection import Connection, server_name_options

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.transfer.transfer import FleetAccess

# A response of FetchKV has at most 1 MiB of a block. Clients accept larger messages by default.
_MAX_RESPONSE_BYTES = 4 << 20
_OPTIONS = (("grpc.max_receive_message_length", _MAX_RESPONSE_BYTES),)

_logger = logging.getLogger(__name__)


class _Source(NamedTuple):
    """What a section `kv_sources` says about a server: the section's name, the file of CAs, and the token."""

    name: str
    tls_ca: str | None
    token: str | None


def require_sources(configs: Mapping[str, KVSourceConfig]) -> None:
    """Check the sections `kv_sources`, and read once all files that they name, before a model is loaded.

    Args:
        configs: the servers, by the names of their sections.

    Raises:
        ConfigError: a file with a token or certificates cannot be used, a token would be sent unencrypted to another
            machine, or two sections have the same address. The message contains no part of a token.
    """
    KVSources(configs)


class KVSources:
    """Connections to the configured servers and to other members of this server's fleet. For use on one event loop.

    A connection is opened when it is first needed.

    Args:
        configs: the servers, by the names of their sections.

    Raises:
        ConfigError: as `require_sources`.
    """

    def __init__(self, configs: Mapping[str, KVSourceConfig]) -> None:
        self._sources: dict[str, _Source] = {}  # by address, like the clients
        self._clients: dict[str, AsyncClient] = {}
        for name, config in configs.items():
            address = config.address
            token = _read_token(name, config)
            _require_access(name, config, token)
            if address in self._sources:
                raise ConfigError(
                    f"kv_sources.{name}.address: kv_sources.{self._sources[address].name} has the same address; each "
                    "must be unique"
                )
            self._sources[address] = _Source(name, config.tls_ca, token)

    def has_section(self, address: str) -> bool:
        """Return whether a section has this address."""
        return address in self._sources

    def client_of(self, address: str, fleet: FleetAccess | None = None) -> AsyncClient:
        """Return the client of a server, which is created by the first call.

        Args:
            address: the server's address.
            fleet: the fleet of this server, if the call comes from the fleet, which may name addresses that no section
                has; otherwise None.

        Raises:
            InvalidRequest: no section has this address, or it is malformed.
            KVSourceUnusable: the CA certificates for the server can no longer be used. The log has the cause, which may
                name files.
        """
        source = self._sources.get(address)
        if source is None and fleet is None:
            raise InvalidRequest("kv_source.address: no section kv_sources of this server has this address")
        if address not in self._clients:
            _require_address(address)
            try:
                if source is not None:
                    client = AsyncClient(address, tls_ca=source.tls_ca, token=source.token, options=_OPTIONS)
                else:
                    assert fleet is not None
                    client = _connect_to_member(address, fleet)
            except (OSError, ValueError) as error:
                _logger.error("%s: %s", "fleet" if source is None else f"kv_sources.{source.name}", error)
                raise KVSourceUnusable(
                    "kv_source: this server's certificates for it cannot be used; the server's log has the cause"
                ) from error
            self._clients[address] = client
        return self._clients[address]


def _connect_to_member(address: str, fleet: FleetAccess) -> AsyncClient:
    """Connect to another server of a fleet. Without TLS, the token is sent only to servers on this machine."""
    may_send_token = fleet.tls_ca is not None or is_on_this_machine(address)
    token = fleet.token if may_send_token else None
    return AsyncClient(
        address, tls_ca=fleet.tls_ca, token=token, options=(*_OPTIONS, *server_name_options(fleet.tls_name))
    )


def _require_address(address: str) -> None:
    try:
        require_address(address)
    except ValueError as error:
        raise InvalidRequest(f"kv_source.{error}") from error


def _require_access(name: str, config: KVSourceConfig, token: str | None) -> None:
    """Refuse settings that a connection would refuse when it is opened."""
    try:
        Connection(config.address, tls_ca=config.tls_ca, token=token)
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        raise ConfigError(f"kv_sources.{name}.tls_ca: expected a file of certificates in PEM, got {reason}") from error
    except ValueError as error:
        raise ConfigError(f"kv_sources.{name}: {error}") from error


def _read_token(name: str, config: KVSourceConfig) -> str | None:
    if config.token_file is None:
        return None
    try:
        token = read_named(f"kv_sources.{name}.token_file", config.token_file).decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"kv_sources.{name}.token_file: the file contains characters other than ASCII") from None
    if not token:
        raise ConfigError(f"kv_sources.{name}.token_file: the file is empty; it must contain a token")
    return token
