"""Block ids, and the copy of one block over another: what the cache and the device share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    pass
if TYPE_CHECKING:
    pass


class BlockCopy(NamedTuple):
    """Copy block `source` over block `target` before anything is computed: its first tokens are shared."""

    source: int
    target: int


BlockIds = npt.NDArray[np.int32]


BLOCK_ID_BYTES = 4
