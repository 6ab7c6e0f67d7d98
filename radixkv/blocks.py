"""Block ids and block copies: the interface between the cache and the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]

BLOCK_ID_BYTES = 4


class BlockCopy(NamedTuple):
    """A copy of block `source` to block `target`, made before a step because both begin with the same tokens."""

    source: int
    target: int
