"""A number of calls, or of bytes, that callers share."""

from __future__ import annotations

from collections import Counter

from radixkv.errors import QueueFull
from radixkv.service.server.intake.account import Account

_RETRY_S = 1.0


class Shares:
    """Counts what is taken, by account.

    While there is room, anybody may take. Once `most` is taken, an account that has an equal share of it is refused,
    and one that has less is not; nor is the first that an account takes, however much. At twice `most` everybody is,
    unless nothing is taken.

    Args:
        most: see above.
        what: is counted, in words.
    """

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._taken = 0
        self._by_account: Counter[Account] = Counter()

    @property
    def taken(self) -> int:
        """Sum of what all accounts have taken."""
        return self._taken

    def room(self, account: Account) -> int:
        """Return how much an account may take now that could do with less: what is free, or its share lacks."""
        own = self._by_account.get(account, 0)
        to_share = self._share(own) - own
        return max(0, min(max(self._most - self._taken, to_share), 2 * self._most - self._taken))

    def take(self, account: Account, number: int) -> None:
        """Count something for an account.

        Raises:
            QueueFull: too much is taken, and this account has its share of it.
        """
        own, after = self._by_account.get(account, 0), self._taken + number
        share = self._share(own)
        if after > self._most and own and own + number > share:
            whose = account.kind.name.lower()
            raise QueueFull(
                f"service: expected at most {share} {self._what} of this {whose}, got {own + number}",
                retry_after_s=_RETRY_S,
            )
        if after > 2 * self._most and self._taken:
            raise QueueFull(
                f"service: expected at most {2 * self._most} {self._what}, got more", retry_after_s=_RETRY_S
            )
        self._by_account[account] = own + number
        self._taken = after

    def give_back(self, account: Account, number: int) -> None:
        """Forget what was taken."""
        self._taken -= number
        self._by_account[account] -= number
        if not self._by_account[account]:
            del self._by_account[account]

    def _share(self, own: int) -> int:
        """Return the equal share of an account that has taken `own`."""
        return self._most // (len(self._by_account) + (not own))
