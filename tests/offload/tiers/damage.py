"""Corrupts objects and files, and kills writers, and checks that no wrong block is served.

python -m tests.offload.tiers.damage --cases 100000
python -m tests.offload.tiers.damage --kills 1000
"""

from __future__ import annotations

import argparse
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.native.compiler import NotCompiled
from radixkv.kernels.native.library import load_library
from radixkv.model.on_cpu import native_copies
from radixkv.offload.tiers.block_object import CHECKSUM_BYTES, ObjectFault, open_object
from radixkv.offload.tiers.block_store import StoreBackend
from radixkv.offload.tiers.sealing import BlockCipher
from radixkv.offload.tiers.threaded_store import ThreadedStore
from radixkv.offload.tiers.tier import Absence, LoadedBlock, Tier
from tests.patience import PATIENCE_S

from .blocks import PAYLOAD_BYTES, block, object_of, payload_of, wanted
from .disks import PAGE_BYTES, disk_at
from .writer import NUM_BLOCKS

ROOT_FOLDER = Path(__file__).parents[3]
CIPHER = BlockCipher(bytes(range(32)))
NUM_SLOTS = 24


def cipher_of(data: bytes) -> BlockCipher | None:
    """Return the cipher with which an object was made; None if the object is not encrypted."""
    return CIPHER if len(data) != len(object_of(0)) else None


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for position in rng.sample(range(len(data)), rng.choice((1, 1, 2, 3))):
        changed[position] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def tear(data: bytes, rng: random.Random) -> bytes:
    """Return what a torn write leaves: the beginning of the object, and the end of the older one in its slot."""
    start = rng.randrange(1, len(data))
    older = object_of(NUM_BLOCKS + 1, 0, cipher_of(data))
    torn = data[:start] + older[start:]
    return torn if torn != data else flip_bits(data, rng)


def zero(data: bytes, rng: random.Random) -> bytes:
    """Return the object with zeros from some byte on, like pages that were never written."""
    start = rng.randrange(len(data) - CHECKSUM_BYTES)
    return data[:start] + bytes(len(data) - start)


def swap(data: bytes, rng: random.Random) -> bytes:
    """Return the object of another block."""
    return object_of(NUM_BLOCKS + rng.randrange(1, 9), 0, cipher_of(data))


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flip_bits, cut, tear, zero, swap)


def open_damaged_objects(num_cases: int, seed: int) -> Counter[str]:
    """Open damaged objects. Returns the number of those that were served, and of the others by their faults."""
    rng = random.Random(seed)
    ciphers = (None, CIPHER)
    sound = {(number, cipher): object_of(number, 0, cipher) for number in range(NUM_BLOCKS) for cipher in ciphers}
    counts: Counter[str] = Counter()
    for case in range(num_cases):
        number = rng.randrange(NUM_BLOCKS)
        cipher = rng.choice(ciphers)
        data = DAMAGES[case % len(DAMAGES)](sound[number, cipher], rng)
        result = open_object(memoryview(data), wanted(number, cipher), PAYLOAD_BYTES)
        counts[result.value if isinstance(result, ObjectFault) else "served"] += 1
    return counts


def read_damaged_files(num_cases: int, seed: int) -> Counter[str]:
    """Corrupt the files of a closed disk store, and read them again. Returns the counts of `count_served_blocks`.

    Most blocks are still right, since each case changes only a few places.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(num_cases):
            store = disk_at(Path(folder), NUM_SLOTS, native_copies())
            _fill(store)
            store.close()
            damage_files(Path(folder), rng)
            counts.update(count_served_blocks(disk_at(Path(folder), NUM_SLOTS, native_copies())))
    return counts


def damage_files(folder: Path, rng: random.Random) -> None:
    """Flip bits in the files of the only store in a folder, and sometimes swap two slots or truncate a file."""
    (directory,) = folder.iterdir()
    for name in ("heads", "blocks", "index"):
        data = bytearray((directory / name).read_bytes())
        slot_bytes = 64 if name == "index" else PAGE_BYTES
        num_bytes = NUM_SLOTS * slot_bytes
        for _ in range(rng.randrange(4)):
            data[rng.randrange(num_bytes)] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:  # swap two slots, or two lines of the index
            slots = rng.randrange(NUM_SLOTS), rng.randrange(NUM_SLOTS)
            first, second = (slice(slot * slot_bytes, (slot + 1) * slot_bytes) for slot in slots)
            data[first], data[second] = data[second], data[first]
        if rng.random() < 0.2:
            del data[rng.randrange(num_bytes) :]
        (directory / name).write_bytes(data)


def _fill(store: StoreBackend) -> None:
    store.put([block(number) for number in range(NUM_SLOTS)])


def count_served_blocks(store: StoreBackend) -> Counter[str]:
    """Load every block from a store, and close it. Returns the number of right, wrong, absent and rejected blocks."""
    counts: Counter[str] = Counter()
    tier = Tier("disk", ThreadedStore(store), PAYLOAD_BYTES)
    results = tier.load([wanted(number) for number in range(NUM_BLOCKS)]).result(PATIENCE_S)
    for number, result in enumerate(results):
        if isinstance(result, LoadedBlock):
            counts["right" if result.payload == payload_of(number) else "wrong"] += 1
        else:
            counts["absent" if result is Absence.ABSENT else result.value] += 1
    tier.close()
    return counts


def kill_writers(num_kills: int, seed: int, num_slots: int = NUM_SLOTS) -> Counter[str]:
    """Kill writers of one directory at random moments. Returns how many blocks the next processes read, and restarts.

    Every other writer uses the compiled C++ kernels, if there are any.
    """
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    library = _library_file()
    with tempfile.TemporaryDirectory() as folder:
        for kill in range(num_kills):
            command = [sys.executable, "-m", "tests.offload.tiers.writer", folder, str(num_slots), str(seed + kill)]
            command += library if kill % 2 else ()
            with subprocess.Popen(command, cwd=ROOT_FOLDER, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                time.sleep(rng.random() * 0.02)  # a random moment
                process.kill()
            counts.update(count_served_blocks(disk_at(Path(folder), num_slots, native_copies())))
            counts["restarts"] += 1
    return counts


def _library_file() -> list[str]:
    """Return a list with the path of the compiled library for the writers; an empty list if there is no library."""
    try:
        return [str(load_library(cache_directory())._name)]
    except NotCompiled:
        return []


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.offload.tiers.damage", description=__doc__)
    parser.add_argument(
        "--cases", type=int, default=0, help="number of damaged objects; a hundredth as many damaged files"
    )
    parser.add_argument("--kills", type=int, default=0, help="number of killed writers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # faults are counted
    objects = open_damaged_objects(args.cases, args.seed)
    files = read_damaged_files(args.cases // 100, args.seed)
    kills = kill_writers(args.kills, args.seed)
    print(f"damaged objects: {dict(objects)}\ndamaged files: {dict(files)}\nkilled writers: {dict(kills)}")
    return 1 if objects["served"] or files["wrong"] or kills["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
