"""Measures each store of blocks, compared with copying the same bytes, or with a bare client that transfers them.

python -m bench.stores --disk DIRECTORY --redis redis://127.0.0.1:6379/0 --json stores.json

Blocks are saved and loaded as in the engine: on the threads of the store, with keys, checksums and verification.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.parts.device_time import time_host_s
from bench.parts.result_file import write_result
from bench.stores import benched_store
from bench.stores.benched_store import BenchedStore
from radixkv.kernels.kv_pool import KVPool
from radixkv.model.on_cpu import native_copies
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat, BlockKeys
from radixkv.offload.block_mover import BlockMover
from radixkv.offload.tiers.block_object import BlockObject, Wanted
from radixkv.offload.tiers.threaded_store import ThreadedStore
from radixkv.offload.tiers.tier import LoadedBlock, Miss, Tier

BLOCK_SIZE = 64
_BATCH = 8  # blocks of one call
_PARENT_KEY = bytes(32)  # any key; blocks are found by their own
_KV_BYTES = 4  # an element of a key and an element of a value, 16 bits each


@dataclass(frozen=True, slots=True)
class StoreRow:
    """One direction of one store, medians over the rounds.

    Attributes:
        name: name of the store.
        direction: save, load, or load cold.
        ratio: bytes per second of the store divided by those of its peer in the same round.
        store_gb_s, peer_gb_s: 10^9 bytes per second.
        verified_ratio: the `ratio` that the peer itself reaches if it also computes checksums. A store, which has
            threads, keys and headers in addition, can hardly exceed it. None if it was not measured.
    """

    name: str
    direction: str
    ratio: float
    store_gb_s: float
    peer_gb_s: float
    verified_ratio: float | None = None


class Blocks:
    """The blocks that are saved and loaded: random payloads, and the pool into which they are loaded.

    Args:
        payload_bytes: bytes of one block, a multiple of 4.
        num_blocks: blocks per round.
        seed: seed of the payloads.
        max_calls: maximum number of loads in flight; None for all loads of a round.
    """

    def __init__(self, payload_bytes: int, num_blocks: int, seed: int, max_calls: int | None = None) -> None:
        self._max_calls = max_calls or num_blocks
        self.format = BlockFormat("bench", "bfloat16", "bf16", "by block", BLOCK_SIZE, payload_bytes, "cpu")
        random = np.random.default_rng(seed)
        self.payloads = [memoryview(random.bytes(payload_bytes)) for _ in range(num_blocks)]
        # Aligned to a page: otherwise a processor may copy from the page cache at a quarter of the speed.
        pool = KVPool.allocate(num_blocks, 1, 1, 1, payload_bytes // _KV_BYTES, dtype=torch.float16)
        self._mover = BlockMover([pool], native=native_copies())
        self.targets = [block.numpy() for block in pool.blocks]
        self._tokens = [random.integers(0, 50_000, BLOCK_SIZE).astype("<u4").tobytes() for _ in range(num_blocks)]
        keys = BlockKeys(self.format)
        root = keys.root(Namespace("bench"))
        self._keys = [keys.child(root, tokens) for tokens in self._tokens]

    @property
    def object_bytes(self) -> int:
        """Size of one object."""
        return BlockObject(self._keys[0], bytes(32), 0, self._tokens[0], self.payloads[0]).num_bytes

    def save(self, tier: Tier) -> None:
        """Save all blocks, several per call."""
        pending = []
        for start in range(0, len(self._keys), _BATCH):
            batch = slice(start, start + _BATCH)
            blocks = zip(self._keys[batch], self._tokens[batch], self.payloads[batch], strict=True)
            objects = [BlockObject(key, _PARENT_KEY, 0, tokens, payload) for key, tokens, payload in blocks]
            pending.append(tier.save(objects))
        if any(each.result() is None for each in pending):
            raise RuntimeError("store: expected all blocks to be saved, got an error")

    def load(self, tier: Tier, *, copies: bool) -> None:
        """Load and verify all blocks, and copy them into the pool if requested, while others are loaded."""
        loading: deque[tuple[int, Future[list[LoadedBlock | Miss]]]] = deque()
        # The blocks of a round are released at its end, so that the store fills as much memory as its peer.
        loaded_blocks: list[LoadedBlock] = []
        for start in range(0, len(self._keys), _BATCH):
            if len(loading) == self._max_calls:
                loaded_blocks += self._wait_and_copy(*loading.popleft(), copies=copies)
            batch = slice(start, start + _BATCH)
            wanted = [Wanted(*each) for each in zip(self._keys[batch], self._tokens[batch], strict=True)]
            loading.append((start, tier.load(wanted)))
        while loading:
            loaded_blocks += self._wait_and_copy(*loading.popleft(), copies=copies)
        for each in loaded_blocks:
            each.loan.release()

    def _wait_and_copy(
        self, start: int, future: Future[list[LoadedBlock | Miss]], *, copies: bool
    ) -> list[LoadedBlock]:
        """Wait for blocks, and copy them if requested. Returns the blocks that were not copied."""
        loaded: list[LoadedBlock] = []
        for each in future.result():
            if not isinstance(each, LoadedBlock):
                raise RuntimeError(f"store: expected all blocks, got one that is {each.value}")
            loaded.append(each)
        if not copies:
            return loaded
        self._mover.write(range(start, start + len(loaded)), [each.payload for each in loaded])
        for each in loaded:
            each.loan.release()
        return []

    def delete(self, tier: Tier) -> None:
        """Delete all blocks."""
        tier.delete(self._keys).result()

    def require_equal(self, tier: Tier) -> None:
        """Raise RuntimeError if loaded blocks differ from the saved ones."""
        self.load(tier, copies=True)
        if any(target.tobytes() != payload for target, payload in zip(self.targets, self.payloads, strict=True)):
            raise RuntimeError("store: loaded bytes differ from the saved ones")


def measure(store: BenchedStore, blocks: Blocks, num_rounds: int) -> list[StoreRow]:
    """Measure a store and its peer in turn, after a first round that is not counted. Closes the store.

    Before each save to a disk and each cold load, everything is written to the disk and evicted from the page cache.
    """
    tier = Tier(store.name, ThreadedStore(store.backend), blocks.format.payload_bytes)
    targets = [target.data for target in blocks.targets]
    times: dict[str, list[tuple[float, float]]] = {"save": [], "load": [], "load cold": []}
    verified_ratios: list[float] = []
    try:
        for turn in range(num_rounds + 1):
            forget = store.forget or _do_nothing
            forget()
            is_first = turn % 2 == 0
            save, write = partial(blocks.save, tier), partial(store.write, blocks.payloads)
            times["save"].append(_time_both(save, write, forget, is_ours_first=is_first))
            blocks.require_equal(tier)
            load, read = partial(blocks.load, tier, copies=store.copies), partial(store.read, targets)
            read()  # warms up the peer, as `require_equal` warmed up the store
            times["load"].append(_time_both(load, read, _do_nothing, is_ours_first=is_first))
            if store.verify is not None:
                verified_ratios.append(times["load"][-1][1] / time_host_s(partial(store.verify, targets)))
            if store.forget is not None:
                forget()
                times["load cold"].append(_time_both(load, read, forget, is_ours_first=is_first))
            blocks.delete(tier)
    finally:
        tier.close()
    num_bytes = sum(payload.nbytes for payload in blocks.payloads)
    rows = [_row(store.name, direction, pairs[1:], num_bytes) for direction, pairs in times.items() if pairs]
    ratio = round(statistics.median(verified_ratios[1:]), 3) if verified_ratios else None
    return [replace(row, verified_ratio=ratio) if row.direction == "load" else row for row in rows]


def _row(name: str, direction: str, pairs: list[tuple[float, float]], num_bytes: int) -> StoreRow:
    ratio = statistics.median(peer_s / store_s for store_s, peer_s in pairs)
    store_s, peer_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    return StoreRow(
        name, direction, round(ratio, 3), round(num_bytes / store_s / 1e9, 3), round(num_bytes / peer_s / 1e9, 3)
    )


def _time_both(
    ours: Callable[[], None], theirs: Callable[[], None], between: Callable[[], None], *, is_ours_first: bool
) -> tuple[float, float]:
    """Run the store and its peer in the chosen order, and return the seconds of each."""
    first_s = time_host_s(ours if is_ours_first else theirs)
    between()
    second_s = time_host_s(theirs if is_ours_first else ours)
    return (first_s, second_s) if is_ours_first else (second_s, first_s)


def _do_nothing() -> None:
    """Do nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure host memory, a disk, and the servers that the options name."""
    args = _parser().parse_args(arguments)
    blocks = Blocks(args.payload_bytes, args.blocks, args.seed, args.calls)
    rows: list[StoreRow] = []
    for opening in _stores(args, blocks):
        with opening as store:
            rows += measure(store, blocks, args.rounds)
    print("| store | direction | ratio to the bare copy | ratio with checksum | GB/s | bare GB/s |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        verified = "" if row.verified_ratio is None else f"{row.verified_ratio:.2f}"
        speeds = f"{row.store_gb_s:.2f} | {row.peer_gb_s:.2f}"
        print(f"| {row.name} | {row.direction} | {row.ratio:.2f} | {verified} | {speeds} |")
    sizes = {name: getattr(args, name) for name in ("payload_bytes", "blocks", "rounds", "calls", "seed")}
    result = {**sizes, "rows": [dataclasses.asdict(row) for row in rows]}
    write_result(args.json, "bench.stores", arguments, result)
    return 0


def _stores(args: argparse.Namespace, blocks: Blocks) -> Iterator[contextlib.AbstractContextManager[BenchedStore]]:
    yield benched_store.host(blocks.format, blocks.object_bytes, args.blocks)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        yield benched_store.disk(blocks.format, blocks.object_bytes, args.blocks, Path(folder))
    if args.redis is not None:
        yield benched_store.redis(blocks.format, blocks.object_bytes, args.redis)
    if args.mooncake is not None:
        yield benched_store.mooncake(blocks.format, blocks.object_bytes, args.mooncake)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.stores", description=(__doc__ or "").partition("\n")[0])
    payload = "bytes of a block, a multiple of 4; default 1 MiB"
    parser.add_argument("--payload-bytes", type=_payload_bytes, default=1 << 20, metavar="N", help=payload)
    parser.add_argument("--blocks", type=int, default=128, metavar="N", help="blocks per round; default 128")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="measured rounds; default 7")
    calls = "maximum number of loads of eight blocks in flight; default: all loads of a round"
    parser.add_argument("--calls", type=int, metavar="N", help=calls)
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--disk",
        type=Path,
        metavar="DIRECTORY",
        help="directory on the disk to measure; default: the one for temporary files",
    )
    parser.add_argument("--redis", metavar="URL", help="a running server, whose keys bare:* are overwritten")
    parser.add_argument("--mooncake", metavar="HOST:PORT", help="a running master")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _payload_bytes(text: str) -> int:
    if not text.isdecimal() or not int(text) or int(text) % 4:
        raise argparse.ArgumentTypeError(f"expected a multiple of 4, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
