"""What a session waits for after a request."""

from __future__ import annotations

from enum import IntEnum


class Awaits(IntEnum):
    """What the session of a request waits for when the request has ended, which shows how soon its next turn comes.

    Attributes:
        UNKNOWN: nothing is known.
        TOOL: the answer ended in a tool call. The next turn comes as soon as the tool has returned.
        USER: the answer ended the turn. The next turn comes when a person or a program has read it, if at all.
        NOTHING: the session has ended, and has no next turn.
    """

    UNKNOWN = 0
    TOOL = 1
    USER = 2
    NOTHING = 3
