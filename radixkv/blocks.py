"""Block ids, and the copy of one block over another: all that the cache and the device share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]

BLOCK_ID_BYTES = 4


class BlockCopy(NamedTuple):
    """Copy block `source` over block `target` before anything is computed, because they share their first tokens."""

    source: int
    target: int
