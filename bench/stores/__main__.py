"""Measures each store of blocks, compared with copying the same bytes, or with a bare client that transfers them.

python -m bench.stores --disk DIRECTORY --redis redis://127.0.0.1:6379/0 --json stores.json

Blocks are saved and loaded as in the engine: on the threads of the store, with keys, checksums and verification.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.parts.result_file import write_result
from bench.stores import benched_store
from bench.stores.benched_store import BenchedStore
from bench.stores.run import Blocks, StoreRow, measure


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
