"""The metadata of a replica, which Ray passes to the router of the fleet."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class FleetSecrets:
    """The secrets of one fleet, generated at its start. Ray passes them to its processes; clients never get them.

    Attributes:
        events_key: key of the namespaces in events, so that the router can compute the hashes of all tenants.
        token: authenticates the ingress and the replicas to each other, if clients need credentials.
    """

    events_key: bytes = field(repr=False)
    token: str = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        """Generate new secrets."""
        return cls(secrets.token_bytes(32), secrets.token_urlsafe(32))

    @property
    def kv_key(self) -> bytes:
        """Key that authenticates the K/V that replicas send to each other, if there is no `tiers.secret_file`."""
        return blake2b(self.token.encode(), key=self.events_key, person=b"radixkv fleet kv").digest()


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Properties of a replica that never change.

    Attributes:
        address: address of its gRPC server, HOST:PORT.
        epoch: epoch of its pool; it changes with each restart.
        model: name of the model.
        fingerprint: fingerprint of the model; part of each namespace.
        vocab_size: number of the model's tokens; token ids are smaller.
        max_prompt_tokens: maximum length of a prompt.
        event_block_size: tokens per block in its events.
        open_tenant: tenant whose events use no key; see `Identities`.
        max_deadline_s: maximum duration of a call in seconds.
        secrets: secrets of its fleet.
    """

    address: str
    epoch: int
    model: str
    fingerprint: str
    vocab_size: int
    max_prompt_tokens: int
    event_block_size: int
    open_tenant: str
    max_deadline_s: float
    secrets: FleetSecrets

    def to_metadata(self) -> dict[str, Any]:
        """Return the properties as text and numbers, which Ray can pass on."""
        properties = {
            each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "secrets"
        }
        return {**properties, "events_key": self.secrets.events_key.hex(), "token": self.secrets.token}

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """Return the properties from the result of `to_metadata`."""
        properties = {key: value for key, value in metadata.items() if key not in ("events_key", "token")}
        return cls(**properties, secrets=FleetSecrets(bytes.fromhex(metadata["events_key"]), metadata["token"]))
