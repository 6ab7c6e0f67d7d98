"""Measures whether a small Redis keeps a prefix that all requests share, although they find the prefix on the device.

python -m bench.stores.recency --redis redis://127.0.0.1:6379/0 --json recency.json

One server computes requests that share a prefix and have different suffixes, with many times more blocks than Redis can
hold. Then a second server looks up the prefix. The benchmark empties the database, and changes its `maxmemory` and
eviction policy while it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis

from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.service.client import Client

_BLOCK_TOKENS = 64
_NUM_HOT_BLOCKS = 8
_NUM_SUFFIX_BLOCKS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print one row."""
    args = _parser().parse_args(arguments)
    client: Any = redis.Redis.from_url(args.redis)
    with client:
        settings_before = {name: client.config_get(name)[name] for name in ("maxmemory", "maxmemory-policy")}
        try:
            client.flushdb()
            client.config_set("maxmemory", args.store_bytes)
            client.config_set("maxmemory-policy", "allkeys-lru")
            row = _measure(args)
        finally:
            for name, setting in settings_before.items():
                client.config_set(name, setting)
    for name, number in row.items():
        print(f"{name:24} {number}")
    write_result(args.json, "bench.stores.recency", arguments, row)
    return 0


def _measure(args: argparse.Namespace) -> dict[str, float]:
    settings = (f"cache.block_size={_BLOCK_TOKENS}", f"tiers.redis_url={args.redis}", "tiers.trusted=true")
    hot_prefix = [index * 7 % 251 for index in range(_NUM_HOT_BLOCKS * _BLOCK_TOKENS)]
    with (
        ServerProcess(serve_command("tiny", "cpu", settings), checkout=args.checkout) as address,
        Client(address) as client,
    ):
        start_s = time.perf_counter()
        for number in range(args.requests):
            suffix = [(number * 13 + index * 5) % 249 for index in range(_NUM_SUFFIX_BLOCKS * _BLOCK_TOKENS)]
            # Two tokens encode the number of the request, so that no two suffixes begin alike.
            client.prefill([*hot_prefix, number % 250, number // 250, *suffix])
        requests_s = time.perf_counter() - start_s
        time.sleep(args.pause_s)
        (tier,) = client.stats().tiers
        with (
            ServerProcess(serve_command("tiny", "cpu", settings), checkout=args.checkout) as other_address,
            Client(other_address) as other_client,
        ):
            usage = other_client.prefill([*hot_prefix, 1]).usage
    return {
        "requests": args.requests,
        "requests_s": round(requests_s, 3),
        "saved_blocks": tier.saved_blocks,
        "touched_blocks": tier.touched_blocks,
        "rewritten_blocks": tier.rewritten_blocks,
        "hot_blocks": _NUM_HOT_BLOCKS,
        "found_by_a_new_server": usage.remote_tokens // _BLOCK_TOKENS,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.stores.recency", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--redis", required=True, metavar="URL", help="a running server, whose database is emptied")
    parser.add_argument("--store-bytes", type=int, default=35_000_000, metavar="N", help="maxmemory; default 35 MB")
    parser.add_argument("--requests", type=int, default=200, metavar="N")
    pause = "seconds between the last request and the start of the second server; default 1"
    parser.add_argument("--pause-s", type=float, default=1.0, metavar="S", help=pause)
    parser.add_argument("--checkout", type=Path, metavar="DIR", help="measure this checkout of radixkv instead")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
