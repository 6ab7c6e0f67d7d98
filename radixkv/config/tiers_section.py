"""The section of the stores below the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from radixkv.config.bounds import Range, require_fields

_Bytes = Annotated[int, Range(1, 2**63 - 1)]


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """Stores for blocks that leave the device. Each is off without its keys.

    Attributes:
        host_bytes: host memory for blocks; pinned where there is a GPU.
        disk_path: directory for blocks on a local disk, which the next start of the same model finds. One process has
            it at a time.
        disk_bytes: room for blocks there. Without it, half of what is free there at the start.
    """

    host_bytes: _Bytes | None = None
    disk_path: str | None = None
    disk_bytes: _Bytes | None = None

    def __post_init__(self) -> None:
        require_fields("tiers", self)
