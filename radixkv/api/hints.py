"""Hints of callers about the future use of cached tokens."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

MAX_HINT_ACTIONS = 16
MAX_DIRECTIVES = 128


class HintStatus(IntEnum):
    """What was done with a hint.

    Attributes:
        ACCEPTED: the hint had its effect on all cached tokens that it addresses.
        CLIPPED: the hint had its effect on some of them.
        REFUSED: the hint had no effect.
    """

    ACCEPTED = 1
    CLIPPED = 2
    REFUSED = 3


class HintAction(NamedTuple):
    """One action of a `KvHintsEnvelope`; see proto/radixkv/v1/hints.proto for the actions and their payloads.

    Attributes:
        action_id: returned in the outcome.
        action_type: such as `kv.retain`.
        action_version: "1.x" or "0.x".
        payload: decoded JSON.
    """

    action_id: str
    action_type: str
    action_version: str
    payload: Mapping[str, Any]


class HintOutcome(NamedTuple):
    """What was done with one action.

    Attributes:
        action_id: id of the action.
        status: see `HintStatus`.
        reason: why an action was clipped or refused; empty for an accepted one.
        tokens: tokens for which it had an effect.
        is_missing: whether it was refused because nothing that it addresses is cached.
    """

    action_id: str
    status: HintStatus
    reason: str = ""
    tokens: int = 0
    is_missing: bool = False


class AgentStats(NamedTuple):
    """Sessions, hints and prefetches of a server.

    Attributes:
        sessions: sessions that are known now.
        hints: totals since the start, by action type and status, such as `("kv.pin", "clipped")`. Action types that do
            not exist count as `other`.
        prefetched_tokens: tokens that were loaded before a request needed them.
        dropped_prefetches: prefetches that loaded nothing: there was no room, no tier had the blocks any more, the
            session was no longer known, or the namespace was purged.
    """

    sessions: int
    hints: Mapping[tuple[str, str], int]
    prefetched_tokens: int = 0
    dropped_prefetches: int = 0
