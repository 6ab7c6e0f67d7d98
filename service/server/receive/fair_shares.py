"""Fair shares of a limited resource: a number of calls or of bytes, divided among quota keys."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from radixkv.errors import QueueFull
from radixkv.service.server.auth.identity import Identity

_RETRY_S = 1.0


class QuotaKind(StrEnum):
    """Kinds of quota keys. Keys of different kinds never compare equal, whatever their names are.

    A `StrEnum`, because members of a plain `Enum` are hashed in Python, several times per call.
    """

    TENANT = "the tenant that owns the data of a request"
    CREDENTIAL = "a caller with a credential"
    CONNECTION = "a caller without a credential"


class QuotaKey(NamedTuple):
    """The party that a call, or the memory it holds, is charged to."""

    kind: QuotaKind
    name: str

    @classmethod
    def of_caller(cls, identity: Identity | None, peer: str) -> QuotaKey:
        """Return the key of a caller: its credential, over any number of connections, or else its connection.

        Callers without a credential are not grouped by IP address: all of them may be on this machine or behind one
        proxy.

        Args:
            identity: the authenticated caller; None if the method needs no authentication.
            peer: the connection, as gRPC names it.
        """
        if identity is None or identity.is_anyone:
            return cls(QuotaKind.CONNECTION, peer)
        return cls(QuotaKind.CREDENTIAL, identity.name)

    @classmethod
    def of_tenant(cls, name: str) -> QuotaKey:
        """Return the key of a tenant."""
        return cls(QuotaKind.TENANT, name)


class FairShares:
    """Divides `limit` units fairly among the quota keys that use some.

    Up to the limit, every request for units is granted. Beyond it, a key is granted units only up to an equal share of
    the limit, except that the first request of a key is granted, however large. Beyond twice the limit, every request
    is refused, unless nothing is in use.

    Args:
        limit: units that can be used before shares are enforced.
        unit: what is counted, in the plural, for error messages.
    """

    def __init__(self, limit: int, unit: str) -> None:
        self._limit = limit
        self._unit = unit
        self._used = 0
        self._used_by: dict[QuotaKey, int] = {}

    @property
    def used(self) -> int:
        """Units in use by all keys."""
        return self._used

    def available(self, key: QuotaKey) -> int:
        """Return the number of units that a key can take now: the free ones, or those up to its share if more.

        `take` may grant more to a key that uses none.
        """
        own = self._used_by.get(key, 0)
        up_to_share = self._share(own) - own
        return max(0, min(max(self._limit - self._used, up_to_share), 2 * self._limit - self._used))

    def take(self, key: QuotaKey, number: int) -> None:
        """Charge units to a key.

        Raises:
            QueueFull: the limit would be exceeded, and so would the share of this key, or twice the limit.
        """
        own = self._used_by.get(key, 0)
        after = self._used + number
        if after > self._limit:
            self._require_share(key, own, number)
        self._used_by[key] = own + number
        self._used = after

    def release(self, key: QuotaKey, number: int) -> None:
        """Return units that `take` granted."""
        self._used -= number
        left = self._used_by[key] - number
        if left:
            self._used_by[key] = left
        else:
            del self._used_by[key]

    def _require_share(self, key: QuotaKey, own: int, number: int) -> None:
        share = self._share(own)
        if own and own + number > share:
            raise QueueFull(
                f"service: expected at most an equal share of {self._limit} {self._unit} for this "
                f"{key.kind.name.lower()}, got {own + number}",
                retry_after_s=_RETRY_S,
            )
        if self._used + number > 2 * self._limit and self._used:
            raise QueueFull(
                f"service: more than {2 * self._limit} {self._unit} would be in use", retry_after_s=_RETRY_S
            )

    def _share(self, own: int) -> int:
        """Return the equal share of a key that uses `own` units."""
        return self._limit // (len(self._used_by) + (not own))
