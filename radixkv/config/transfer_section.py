"""The sections of K/V that goes from server to server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from radixkv.config.address import host_and_port
from radixkv.config.bounds import OneOf, Range, require_fields


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """K/V that other servers fetch from here, and this server from others.

    Attributes:
        role: the calls that this server takes: `both`; `prefill` does not take Generate, and sends K/V without `serve`;
            `decode` does not take Prefill, and needs sections kv_sources.
        serve: whether the holder of a lease may fetch the K/V of its prompt with FetchKV.
        max_fetching_bytes: K/V that is fetched from the sections kv_sources and not copied to the device yet, for one
            tenant half of it. What is beyond is computed.
    """

    role: Annotated[str, OneOf("both", "prefill", "decode")] = "both"
    serve: bool = False
    max_fetching_bytes: Annotated[int, Range(1, 2**63 - 1)] = 2**30

    def __post_init__(self) -> None:
        require_fields("transfer", self)

    @property
    def sends(self) -> bool:
        """Whether FetchKV is answered."""
        return self.serve or self.role == "prefill"


@dataclass(frozen=True, slots=True)
class KVSourceConfig:
    """A server that K/V may be fetched from, from a section `kv_sources.NAME`. Callers name it by its address.

    Attributes:
        address: `HOST:PORT`, as callers give it.
        token_file: a file with the token that is shown there; it must be one for the tenants whose K/V is fetched.
        tls_ca: PEM file with the authorities of its certificate. Without it there is no TLS.
    """

    address: str = ""
    token_file: str | None = None
    tls_ca: str | None = None

    def require(self, path: str) -> None:
        """Refuse values out of range; `Config` calls this, since only it knows the section's name.

        Args:
            path: `kv_sources.NAME`.

        Raises:
            ConfigError: the message names the key.
        """
        require_fields(path, self)
        host_and_port(f"{path}.address", self.address)
