"""A process that writes, replaces and deletes blocks on a disk until it is killed.

python -m tests.offload.tiers.writer PATH NUM_SLOTS SEED [LIBRARY]

With LIBRARY, the file of the compiled C++ kernels, the process copies blocks with them.
"""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path

from radixkv.kernels.native.copies import NativeCopies

from .blocks import block, key_of
from .disks import disk_at

NUM_BLOCKS = 40


def main() -> None:
    path = Path(sys.argv[1])
    num_slots = int(sys.argv[2])
    seed = int(sys.argv[3])
    rng = random.Random(seed)
    store = disk_at(path, num_slots, _load_native(sys.argv[4]) if sys.argv[4:] else None)
    objects = [[block(number, generation) for number in range(NUM_BLOCKS)] for generation in range(3)]
    print("ready", flush=True)
    while True:
        store.put([rng.choice(objects[rng.randrange(3)]) for _ in range(rng.randrange(1, 8))])
        if rng.random() < 0.2:
            store.delete([key_of(rng.randrange(NUM_BLOCKS))])


def _load_native(library: str) -> NativeCopies:
    """Load the library with the OpenMP that it needs. Otherwise torch loads OpenMP, but its import takes seconds."""
    ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)
    return NativeCopies(ctypes.CDLL(library))


if __name__ == "__main__":
    main()
