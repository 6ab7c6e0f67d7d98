"""Fair shares of a limited resource: a number of calls or of bytes, divided among quota keys."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from radixkv.errors import QueueFull
from radixkv.service.server.auth.identity import Identity

_RETRY_AFTER_S = 1.0


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

        With these units, at most twice the limit is in use.
        `take` may grant more to a key that uses none.
        """
        used_by_key = self._used_by.get(key, 0)
        up_to_share = self._share(used_by_key) - used_by_key
        return max(0, min(max(self._limit - self._used, up_to_share), 2 * self._limit - self._used))

    def take(self, key: QuotaKey, num_units: int) -> None:
        """Charge units to a key.

        Raises:
            QueueFull: the limit would be exceeded, and so would the share of this key, or twice the limit.
        """
        used_by_key = self._used_by.get(key, 0)
        used_after = self._used + num_units
        if used_after > self._limit:
            self._require_share(key, used_by_key, num_units)
        self._used_by[key] = used_by_key + num_units
        self._used = used_after

    def release(self, key: QuotaKey, num_units: int) -> None:
        """Return units that `take` granted."""
        self._used -= num_units
        num_left = self._used_by[key] - num_units
        if num_left:
            self._used_by[key] = num_left
        else:
            del self._used_by[key]

    def _require_share(self, key: QuotaKey, used_by_key: int, num_units: int) -> None:
        share = self._share(used_by_key)
        if used_by_key and used_by_key + num_units > share:
            raise QueueFull(
                f"service: expected at most an equal share of {self._limit} {self._unit} for this "
                f"{key.kind.name.lower()}, got {used_by_key + num_units}",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self._used + num_units > 2 * self._limit and self._used:
            raise QueueFull(
                f"service: more than {2 * self._limit} {self._unit} would be in use", retry_after_s=_RETRY_AFTER_S
            )

    def _share(self, used_by_key: int) -> int:
        """Return the equal share of a key that uses `used_by_key` units. If it uses none, it counts as one more key."""
        return self._limit // (len(self._used_by) + (not used_by_key))
