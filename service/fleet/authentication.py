"""Authentication on a replica: by the token of the fleet, or by the credentials of the configuration."""

from __future__ import annotations

import hmac

from radixkv.config import ServerConfig
from radixkv.service.server.identity.callers import HEADER, KnownCallers
from radixkv.service.server.identity.doors import Door, Doors
from radixkv.service.server.identity.identity import Identity, Role
from radixkv.service.server.unfinished_calls import Context

FLEET = Identity("fleet", Role.ADMIN)
"""The ingress and the other replicas. The ingress knows what its callers may, and brings the calls of admins, too."""


class FleetCallers:
    """Knows the fleet by its token, and others by their credentials.

    Args:
        others: those who have a credential.
        token: of the fleet.
    """

    def __init__(self, others: KnownCallers, token: str) -> None:
        self._others = others
        self._header = f"Bearer {token}".encode()

    def of_call(self, context: Context) -> Identity:
        """Return who makes a gRPC call; see `Callers`."""
        shown = [value for name, value in context.invocation_metadata() or () if name == HEADER]
        if len(shown) == 1 and self._is_fleet(str(shown[0])):
            return FLEET
        return self._others.of_call(context)

    def of_header(self, authorization: str | None) -> Identity:
        """Return who sends a header; see `Callers`."""
        if authorization is not None and self._is_fleet(authorization):
            return FLEET
        return self._others.of_header(authorization)

    def _is_fleet(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode("utf-8", "surrogatepass"), self._header)


def replica_doors(config: ServerConfig, token: str) -> Doors:
    """Make the doors of a replica. Without credentials it takes everybody, the fleet too.

    Raises:
        ConfigError: a file of the configuration can't be used.
    """
    doors = Doors(config)
    if doors.callers is not None:
        doors.requests = Door(FleetCallers(doors.callers, token))
    return doors
