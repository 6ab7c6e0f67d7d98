"""The servers that K/V may be fetched from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from radixkv.config import KVSourceConfig
from radixkv.errors import ConfigError, InvalidRequest
from radixkv.service.client.async_client import AsyncClient


class KVSources:
    """Connections to the configured servers, made when they are first needed. One event loop uses it.

    Args:
        configs: the servers, by the names of their sections.

    Raises:
        ConfigError: a file of a token or of certificates can't be used.
    """

    def __init__(self, configs: Mapping[str, KVSourceConfig]) -> None:
        self._configs = {config.address: (name, config) for name, config in configs.items()}
        self._tokens = {config.address: _token(name, config) for name, config in configs.items()}
        self._clients: dict[str, AsyncClient] = {}

    def client_of(self, address: str, fleet_token: str | None = None) -> AsyncClient:
        """Return the connection to a server.

        Args:
            address: of the server.
            fleet_token: to be shown to a server that no section names, another one of the same fleet; None if the
                caller is not that fleet.

        Raises:
            InvalidRequest: no section names this address.
            ConfigError: its certificates can't be used, or a token would go there in the clear.
        """
        if address not in self._configs:
            if fleet_token is None:
                raise InvalidRequest("kv_source.address: expected that of a section kv_sources here, got another")
            if address not in self._clients:
                self._clients[address] = AsyncClient(address, token=fleet_token)
            return self._clients[address]
        if address not in self._clients:
            name, config = self._configs[address]
            try:
                self._clients[address] = AsyncClient(address, tls_ca=config.tls_ca, token=self._tokens[address])
            except (OSError, ValueError) as error:
                raise ConfigError(f"kv_sources.{name}: {error}") from error
        return self._clients[address]


def _token(name: str, config: KVSourceConfig) -> str | None:
    if config.token_file is None:
        return None
    try:
        token = Path(config.token_file).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kv_sources.{name}.token_file: expected a file with a token, got {error}") from error
    if not token:
        raise ConfigError(f"kv_sources.{name}.token_file: expected a token in the file, got none")
    return token
