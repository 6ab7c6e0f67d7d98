"""Facts that a replica of a fleet tells the fleet's router about itself."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class FleetSecrets:
    """The secrets that one fleet makes at its start. Ray carries them to its processes; no caller is told of them.

    Attributes:
        events_key: names namespaces in events, so that the router knows the hashes of all tenants.
        token: shown by the ingress and the replicas to each other, where callers need credentials.
    """

    events_key: bytes = field(repr=False)
    token: str = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        """Draw new ones."""
        return cls(secrets.token_bytes(32), secrets.token_urlsafe(32))


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Facts about a replica that stay the same for its whole life.

    Attributes:
        address: of its gRPC server, HOST:PORT.
        epoch: of its pool; another one means that it has started again.
        model: name of the model.
        fingerprint: of the model; part of each namespace.
        vocab_size: token ids are below it.
        max_prompt_tokens: of the longest prompt.
        event_block_size: tokens of a block in its events.
        open_tenant: whose hashes in its events begin without a key; see `Identities`.
        max_deadline_s: seconds that no call to it takes.
        secrets: of its fleet.
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
        """Return the facts as Ray carries them: text and numbers."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "secrets"}
        return {**plain, "events_key": self.secrets.events_key.hex(), "token": self.secrets.token}

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, Any]) -> Self:
        """Read what `to_metadata` wrote."""
        plain = {key: value for key, value in metadata.items() if key not in ("events_key", "token")}
        return cls(**plain, secrets=FleetSecrets(bytes.fromhex(metadata["events_key"]), metadata["token"]))
