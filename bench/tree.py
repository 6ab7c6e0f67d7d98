"""Measures match, insert, lease and evict, compared with a bare memory comparison and with SGLang's two trees.

    python -m bench.tree --trace conversation.jsonl [--sglang UNPACKED_WHEEL] [--json FILE]

Inserts and matches replay the trace, up to `--limit` requests, in separate passes, with the same prompts and block
size, so that all implementations find the same cold memory. Hits and evictions are measured on generated trees. Results
are medians, except for `publish_a_block`, which is a mean.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.parts.result_file import write_result
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.events.block_identity import Identities
from radixkv.events.event_log import EventLog
from radixkv.events.tree_feed import TreeFeed
from radixkv.namespace import Namespace
from radixkv.planning.trace import load_trace, prompt_tokens

if TYPE_CHECKING:
    from bench.parts.peers.sglang import SglangTree

_NAMESPACE = Namespace("bench")
_VOCAB_SIZE = 2**31 - 1
_HIT_TOKENS = 8192
_EVENT_BLOCK_SIZE = 16
_SAMPLES = 400
_PEER_EVICTIONS = 50  # each visits every leaf, which takes tens of milliseconds with 100,000 leaves
_PEER_MAX_LEAVES = 100_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON."""
    options = _parse(arguments)
    gc.disable()  # a garbage collection during an operation would be counted as part of it
    try:
        report = _measure(options)
    finally:
        gc.enable()
    print(_table(report))
    write_result(options.json, "bench.tree", arguments, report)
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    prompts = [
        prompt_tokens(request, vocab_size=_VOCAB_SIZE).astype("<u4").tobytes()
        for request in load_trace(options.trace, limit=options.limit)
    ]
    peers = _sglang_trees(options.sglang) if options.sglang else {}
    replay = measure_replay(prompts, options.block_size)
    for peer, make_tree in peers.items():
        times = measure_sglang(prompts, options.block_size, make_tree)
        replay |= {f"{peer}_{name}": value for name, value in times.items()}
    report: dict[str, Any] = {
        "trace": options.trace.name,
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)) // 4,
        "block_size": options.block_size,
        "replay_us": replay,
        "hit_us": measure_hit(options.block_size),
        "events_us": measure_events(prompts, options.block_size),
        "evict_us": {f"{leaves}": measure_evict(leaves) for leaves in options.leaves},
    }
    for peer, make_tree in peers.items():
        report[f"{peer}_evict_us"] = {
            f"{leaves}": measure_sglang_evict(leaves, make_tree)
            for leaves in options.leaves
            if leaves <= _PEER_MAX_LEAVES
        }
    report["ratios"] = _ratios(report)
    return report


def measure_replay(prompts: Sequence[bytes], block_size: int) -> dict[str, float]:
    """Insert each prompt, then match each whole prompt. Returns medians in microseconds.

    Each insert gets its own buffer, as each request does, and as SGLang's keys do. Otherwise no memory would be freed
    between two inserts, and their copies would wait for new pages of the operating system: 25 us instead of 16.
    """
    num_blocks = sum(-(-len(prompt) // (4 * block_size)) for prompt in prompts)
    cache = PrefixCache(num_blocks, block_size)
    insert_s: list[float] = []
    for prompt in map(_copy, prompts):
        with cache.lease(_NAMESPACE, prompt) as lease:
            start_s = time.perf_counter()
            lease.commit(lease.num_tokens)
            insert_s.append(time.perf_counter() - start_s)
    match = cache.match(_NAMESPACE, prompts[-1])
    assert match.cached_tokens == len(prompts[-1]) // 4 - 1
    assert match.block_ids.size == -(-match.cached_tokens // block_size)
    stored = iter([_copy(prompt) for prompt in prompts])
    return {
        "insert": _median_us(insert_s),
        "memcmp": _median_us(_time_each(lambda prompt: prompt == next(stored), prompts)),
        "match": _median_us(_time_each(lambda prompt: cache.match(_NAMESPACE, prompt), prompts)),
    }


def measure_events(prompts: Sequence[bytes], block_size: int) -> dict[str, float]:
    """Measure an insert without an event log, with one that has no reader, and with one that records, in turn.

    Returns medians in microseconds; also the median time of publishing the events of an insert, and the mean time of
    publishing per event block.
    """
    num_blocks = sum(-(-len(prompt) // (4 * block_size)) for prompt in prompts)
    feeds = [TreeFeed(EventLog(), _EVENT_BLOCK_SIZE, block_size, Identities(), num_blocks * 64) for _ in range(2)]
    caches = [PrefixCache(num_blocks, block_size, listeners=each) for each in ((), feeds[:1], feeds[1:])]
    feeds[1].switch_on(caches[2].nodes)
    inserts_s: list[list[float]] = [[], [], []]  # of each cache
    publishes_s: list[float] = []
    for number, prompt in enumerate(prompts):
        for index in (number % 3, (number + 1) % 3, (number + 2) % 3):  # each cache is the first one in turn
            with caches[index].lease(_NAMESPACE, _copy(prompt)) as lease:
                start_s = time.perf_counter()
                lease.commit(lease.num_tokens)
                inserts_s[index].append(time.perf_counter() - start_s)
        publishes_s += _time_each(lambda _: feeds[1].publish(), [None])
    names = ("insert_without_log", "insert_with_log_unread", "insert_recorded")
    times = {name: _median_us(each) for name, each in zip(names, inserts_s, strict=True)}
    block_s = sum(publishes_s) / feeds[1].log.num_blocks
    return times | {"publish": _median_us(publishes_s), "publish_a_block": round(block_s * 1e6, 3)}


def measure_sglang(
    prompts: Sequence[bytes], block_size: int, make_tree: Callable[[int], SglangTree]
) -> dict[str, float]:
    """Measure what `measure_replay` does, with a tree of SGLang. Keys and values are built before the timed part."""
    import torch  # the tree's values are tensors

    tree = make_tree(block_size)
    insert_s: list[float] = []
    next_index = 0
    for prompt in prompts:
        key = tree.key(prompt)
        indices = torch.arange(next_index, next_index + len(key))
        next_index += len(key)
        start_s = time.perf_counter()
        tree.insert(key, indices)
        insert_s.append(time.perf_counter() - start_s)
    whole_blocks = len(prompts[-1]) // 4 // block_size * block_size
    assert tree.match_with_indices(tree.key(prompts[-1])).numel() == whole_blocks
    return {
        "insert": _median_us(insert_s),
        "match": _median_us(_time_each(tree.match, map(tree.key, prompts))),
        "match_with_indices": _median_us(_time_each(tree.match_with_indices, map(tree.key, prompts))),
    }


def measure_hit(block_size: int) -> dict[str, float]:
    """Measure a hit of 8,192 tokens: lease and release alone, and with a match before and a commit of 64 new tokens."""
    prefix = np.random.default_rng(0).integers(0, _VOCAB_SIZE, _HIT_TOKENS, dtype=np.uint32).tobytes()
    # Enough blocks for all new tokens, even if a block has one token, so that nothing is evicted.
    cache = PrefixCache(_HIT_TOKENS // block_size + 2 * 64 * _SAMPLES, block_size)
    with cache.lease(_NAMESPACE, prefix) as lease:
        lease.commit(_HIT_TOKENS)
    prompts = [prefix + np.full(64, n, dtype="<u4").tobytes() for n in range(_SAMPLES, 2 * _SAMPLES)]

    def lease_and_release(prompt: bytes) -> None:
        cache.lease(_NAMESPACE, prompt).close()

    def whole_request(prompt: bytes) -> None:
        cache.match(_NAMESPACE, prompt)
        lease = cache.lease(_NAMESPACE, prompt)
        lease.commit(lease.num_tokens)
        lease.close()

    hits_s = _time_each(lease_and_release, [prefix + b"\1\0\0\0"] * _SAMPLES)
    requests_s = _time_each(whole_request, prompts)
    cache.check()
    return {"lease_and_release": _median_us(hits_s), "match_lease_commit_release": _median_us(requests_s)}


def measure_evict(num_leaves: int) -> dict[str, float]:
    """Measure eviction and use of one leaf among many siblings of one block each."""
    cache = PrefixCache(num_leaves + 1, 1)
    shared = np.uint32(1).tobytes()
    leaves = [shared + np.uint32(n + 2).tobytes() for n in range(num_leaves)]
    for leaf in leaves:
        with cache.lease(_NAMESPACE, leaf) as lease:
            lease.commit(2)
    # From the more recently used half, of which no leaf is evicted before it is touched.
    touched = np.random.default_rng(0).choice(num_leaves // 2, _SAMPLES) + num_leaves // 2

    def touch(leaf: bytes) -> None:
        cache.lease(_NAMESPACE, leaf).close()

    cache.evict(2)  # so that each lease finds a free block
    touches_s = _time_each(touch, [leaves[n] for n in touched])
    evictions_s = _time_each(lambda _: cache.evict(1), range(_SAMPLES))
    assert cache.num_evicted_blocks == _SAMPLES + 2
    return {"evict": _median_us(evictions_s), "touch": _median_us(touches_s)}


def measure_sglang_evict(num_leaves: int, make_tree: Callable[[int], SglangTree]) -> dict[str, float]:
    """Measure eviction of one leaf among many siblings with a tree of SGLang."""
    import torch

    tree = make_tree(1)
    for n in range(num_leaves):
        tree.insert(tree.key(np.array([1, n + 2], dtype="<u4").tobytes()), torch.tensor([0, n + 1]))
    evicted_tokens: list[int] = []  # of each eviction
    evictions_s = _time_each(
        lambda _: evicted_tokens.append(tree.evict(1)), range(min(_PEER_EVICTIONS, num_leaves // 2))
    )
    assert set(evicted_tokens) == {1}
    return {"evict": _median_us(evictions_s)}


def _sglang_trees(wheel: Path) -> dict[str, Callable[[int], SglangTree]]:
    from bench.parts.peers.sglang import SglangPythonTree, SglangRustTree

    return {"sglang": partial(SglangRustTree, wheel), "sglang_python": partial(SglangPythonTree, wheel)}


def _copy(prompt: bytes) -> bytes:
    """Return equal bytes in a buffer of their own; `bytes(prompt)` would return the same object."""
    return bytes(bytearray(prompt))


def _time_each(operation: Callable[[Any], object], arguments: Iterable[Any]) -> list[float]:
    """Call an operation with each argument. Returns the seconds of each call."""
    seconds = []
    for argument in arguments:
        start_s = time.perf_counter()
        operation(argument)
        seconds.append(time.perf_counter() - start_s)
    return seconds


def _median_us(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 2)


def _ratios(report: dict[str, Any]) -> dict[str, float]:
    replay, evict = report["replay_us"], report["evict_us"]
    leaf_counts = sorted(evict, key=int)
    ratios = {
        "match / memcmp": replay["match"] / replay["memcmp"],
    }
    fewest, most = leaf_counts[0], leaf_counts[-1]
    ratios[f"evict at {int(most):,} / {int(fewest):,} leaves"] = evict[most]["evict"] / evict[fewest]["evict"]
    for peer in ("sglang", "sglang_python"):
        if f"{peer}_match" in replay:
            name = peer.replace("_", " ")
            ratios[f"{name} match with indices / match"] = replay[f"{peer}_match_with_indices"] / replay["match"]
            ratios[f"{name} insert / insert"] = replay[f"{peer}_insert"] / replay["insert"]
    return {name: round(ratio, 2) for name, ratio in ratios.items()}


def _table(report: dict[str, Any]) -> str:
    mean_tokens = report["prompt_tokens"] / report["requests"]
    lines = [
        f"{report['trace']}: {report['requests']:,} prompts of {mean_tokens:,.0f} tokens on average, blocks of "
        f"{report['block_size']}; medians in microseconds"
    ]
    rows = [(name.replace("_", " "), value) for name, value in report["replay_us"].items()]
    rows += [(f"events: {name.replace('_', ' ')}", value) for name, value in report["events_us"].items()]
    rows += [(f"8k hit: {name.replace('_', ' ')}", value) for name, value in report["hit_us"].items()]
    for peer in ("", "sglang_", "sglang_python_"):
        for leaves, times in report.get(f"{peer}evict_us", {}).items():
            rows += [
                (f"{peer.replace('_', ' ')}{name}, {int(leaves):,} leaves", value) for name, value in times.items()
            ]
    lines += [f"  {name:<42}{value:>10.2f}" for name, value in rows]
    lines += ["ratios", *(f"  {name:<42}{value:>10.2f}" for name, value in report["ratios"].items())]
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tree", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="requests in a format of `radixkv simulate`"
    )
    parser.add_argument("--limit", type=int, default=3000, metavar="N", help="the first N requests; default 3000")
    parser.add_argument("--block-size", type=int, default=64, metavar="B", help="default 64")
    parser.add_argument(
        "--leaves", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000], help="tree sizes for eviction"
    )
    parser.add_argument("--sglang", type=Path, metavar="DIR", help="unpacked wheel of SGLang 0.5.23")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
