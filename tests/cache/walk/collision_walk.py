"""Random operations in namespaces that differ by little, while every hash collides. Blocks tell whose K/V they hold.

python -m tests.cache.walk.collision_walk --operations 1000000 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np

from radixkv.api.retention import Retention
from radixkv.cache.namespaces.purge import all_slices
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import CapacityError
from radixkv.namespace import Namespace, PromptKey

DIGEST = "5d1e6c0ffee"
# Names that a careless key would join, fold or normalize into each other, and one digest in every role.
NAMES = ("", "a", "A", "a\0", "\0a", "a,b", "é", "e\u0301", "\udc80", " ", "('a', 'b')", "x" * 300, DIGEST)
ADAPTERS = ("", DIGEST, f"{DIGEST}@0", f"{DIGEST}@7", "a", "é")
MODELS = ("model", "model:int8", DIGEST)
NAMESPACES = [Namespace(*names) for names in itertools.product(MODELS, NAMES, ADAPTERS, NAMES)]

_BLOCK_SIZE, _NUM_BLOCKS, _NUM_PROMPTS, _MOST_TOKENS = 4, 600, 24, 30


class _ConstantHash:
    """A hash of nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def update(self, _: object) -> None:
        """Take bytes, and forget them."""

    def intdigest(self) -> int:
        """Return the same number for all."""
        return 7


@contextlib.contextmanager
def every_hash_collides() -> Iterator[None]:
    """Give all namespaces, and all prefixes of all of them, one hash: in fingerprints, seeds and Python's dicts."""
    with (
        patch("radixkv.tokens.xxh3_64", _ConstantHash),
        patch("radixkv.namespace._seed", lambda _: 7),
        patch.object(Namespace, "__hash__", lambda _: 7),
    ):
        yield


class CollisionWalk:
    """A cache, and for each slot of its blocks the namespace and the prefix whose K/V it holds.

    All namespaces are asked for the same few prompts, so that whatever is reused across two of them would fit.

    Attributes:
        events: kinds of events, each with its count; `cross-namespace reuses` must stay 0.
    """

    def __init__(self, seed: int, num_namespaces: int = 40) -> None:
        self.random = random.Random(seed)
        self.namespaces = self.random.sample(NAMESPACES, num_namespaces)
        self.prompts = [
            [self.random.randrange(2) for _ in range(self.random.randint(1, _MOST_TOKENS))] for _ in range(_NUM_PROMPTS)
        ]
        self.cache = PrefixCache(_NUM_BLOCKS, _BLOCK_SIZE, max_retained_blocks=60)
        self.slots = np.full((_NUM_BLOCKS, _BLOCK_SIZE), -1)
        self.events: Counter[str] = Counter()
        self._numbers: dict[tuple[int, int], int] = {}  # of a prefix, by that of the one before and its last token

    def run(self, num_operations: int) -> None:
        """Do random things."""
        things = (self._prefill, self._match, self._evict, self._retain, self._purge, self._drain)
        for thing in self.random.choices(things, (70, 20, 4, 4, 1, 1), k=num_operations):
            thing()
        self.cache.check()

    def _prefill(self) -> None:
        index, tokens, numbers = self._prompt()
        try:
            lease = self.cache.lease(self.namespaces[index], tokens)
        except CapacityError:
            return
        with lease:
            if lease.copy is not None:
                self.slots[lease.copy.target] = self.slots[lease.copy.source]
            self._judge(lease.block_ids, numbers, lease.cached_tokens)
            blocks = np.arange(lease.cached_tokens, len(numbers))
            self.slots[lease.block_ids[blocks // _BLOCK_SIZE], blocks % _BLOCK_SIZE] = numbers[lease.cached_tokens :]
            lease.commit(self.random.choice((len(numbers), self.random.randint(0, len(numbers)))))

    def _match(self) -> None:
        index, tokens, numbers = self._prompt()
        match = self.cache.match(self.namespaces[index], tokens)
        self._judge(match.block_ids, numbers, match.cached_tokens)
        former = [PromptKey(each, tokens) for each in self.random.sample(self.namespaces, 2)]
        self.cache.explain(self.namespaces[index], tokens, match.cached_tokens, former)

    def _judge(self, block_ids: np.ndarray, numbers: list[int], cached_tokens: int) -> None:
        held = self.slots[block_ids].ravel()[:cached_tokens]
        self.events["reused tokens"] += cached_tokens
        self.events["reuses"] += cached_tokens > 0
        self.events["cross-namespace reuses"] += held.tolist() != numbers[:cached_tokens]

    def _evict(self) -> None:
        self.events["evicted blocks"] += self.cache.evict(self.random.randint(1, 40))

    def _retain(self) -> None:
        index, tokens, _ = self._prompt()
        self.cache.retain(self.namespaces[index], tokens, Retention(self.random.choice((20, 50, 80)), None))

    def _purge(self) -> None:
        names = self.random.choice(self.namespaces)
        wanted = {field: self.random.choice((None, getattr(names, field))) for field in ("tenant", "adapter", "salt")}
        before = {each: self._num_tokens(each) for each in self.namespaces} if self.random.random() < 0.05 else {}
        self.events["purged blocks"] += self.cache.purge(**wanted).freed_blocks
        for each, num_tokens in before.items():
            is_gone = all(want is None or want == getattr(each, field) for field, want in wanted.items())
            self.events["wrong purges"] += self._num_tokens(each) != (0 if is_gone else num_tokens)

    def _drain(self) -> None:
        all_slices(self.cache.draining(DIGEST))
        left = {each.adapter for each in self.namespaces if self._num_tokens(each)}
        self.events["drains"] += 1
        self.events["wrong purges"] += DIGEST in left

    def _num_tokens(self, namespace: Namespace) -> int:
        tree = self.cache._trees.get(namespace)
        return 0 if tree is None else sum(len(node.tokens) // 4 for node in tree.nodes())

    def _prompt(self) -> tuple[int, bytes, list[int]]:
        """Choose a namespace and a prompt. Returns the number of each of its prefixes in this namespace as well."""
        index, ids = self.random.randrange(len(self.namespaces)), self.random.choice(self.prompts)
        numbers, before = [], -1 - index
        for token in ids:
            before = self._numbers.setdefault((before, token), len(self._numbers))
            numbers.append(before)
        return index, np.array(ids, dtype="<u4").tobytes(), numbers


def main() -> int:
    parser = argparse.ArgumentParser(description="Search for reuse across namespaces while every hash collides.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    events, start_s = Counter[str](), time.perf_counter()
    with every_hash_collides():
        for seed in range(options.seed, options.seed + 20):
            walk = CollisionWalk(seed)
            walk.run(options.operations // 20)
            events.update(walk.events)
    print(f"{options.operations} operations in {time.perf_counter() - start_s:.0f} s: {dict(sorted(events.items()))}")
    return 1 if events["cross-namespace reuses"] or events["wrong purges"] or not events["reuses"] else 0


if __name__ == "__main__":
    sys.exit(main())
