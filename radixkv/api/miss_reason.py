"""The reason why a prompt was not reused completely."""

from __future__ import annotations

import enum


class MissReason(enum.Enum):
    """Why a prompt was not reused up to its last token, which is always computed. Values are the protocol's names.

    `radixkv/api/README.md` explains each reason.
    """

    NONE = "NONE"
    COLD = "COLD"
    DIVERGED = "DIVERGED"
    EVICTED = "EVICTED"
    EXPIRED = "EXPIRED"
    READ_DISABLED = "READ_DISABLED"
    ADAPTER_CHANGED = "ADAPTER_CHANGED"
    NOT_LOADED = "NOT_LOADED"
    NO_STATE = "NO_STATE"
    NO_WINDOW = "NO_WINDOW"
