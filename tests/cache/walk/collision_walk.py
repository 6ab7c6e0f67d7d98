"""Random operations in similar namespaces while all hashes collide. Blocks record whose K/V they contain.

python -m tests.cache.walk.collision_walk --operations 1000000 --seed 0
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from radixkv.api.retention import Retention
from radixkv.cache.changes import Listener
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.public_prefixes import PublicPrefix
from radixkv.cache.purge import all_slices
from radixkv.cache.tenants import Quota
from radixkv.errors import CapacityError, InvalidRequest, UnknownPublicPrefix
from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace, PromptKey

DIGEST = "5d1e6c0ffee"
# Names that a careless key would join, fold or normalize into each other, and one digest as a name of everything.
NAMES = (
    "",
    "a",
    "A",
    "a\0",
    "\0a",
    "a,b",
    "1:4",
    "(public",
    "é",
    "e\u0301",
    "\udc80",
    " ",
    "('a', 'b')",
    "x" * 300,
    DIGEST,
)
ADAPTERS = ("", DIGEST, f"{DIGEST}@0", f"{DIGEST}@7", "a", "é")
MODELS = ("model", "model:int8", DIGEST)
NAMESPACES = [Namespace(*names) for names in itertools.product(MODELS, NAMES, ADAPTERS, NAMES)]

INVOKED = ("1nv0ked", "1nv0ked2")  # digests of adapters that prompts invoke
# Events that must never happen, and events that must happen, or else the walk proves nothing.
WRONG = (
    "cross-namespace reuses",
    "wrong purges",
    "miscounted public tokens",
    "own tokens before public ones",
    "changes under a lease",
    "lost blocks",
)
WANTED = (
    "reuses",
    "evicted blocks",
    "purged blocks",
    "drains",
    "right reuses of public tokens",
    "right reuses below public tokens",
    "right reuses by an invoked adapter",
    "public prefixes refused for lack of blocks",
    "public prefixes unregistered",
    "public prefixes failed",
    "public prefixes that drain",
)

_OPTED_OUT = ("a", "é")  # tenants that do not use public prefixes
_BLOCK_SIZE, _NUM_BLOCKS, _NUM_PROMPTS, _MAX_TOKENS = 4, 600, 24, 30


class _ConstantHash:
    """Stands in for a hash function whose values all collide."""

    def __init__(self, *_: object) -> None:
        pass

    def update(self, _: object) -> None:
        """Ignore the bytes."""

    def intdigest(self) -> int:
        """Return the same number for all inputs."""
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


class _Prompt(NamedTuple):
    """A prompt in a namespace.

    Attributes:
        tokens: the tokens as the cache receives them, with the marks of an invoked adapter.
        invoked: digest of the adapter that the prompt invokes; empty for none.
        path: each token, with the digest of the invoked adapter that computes its K/V; empty for none.
        numbers: the number of each prefix of the prompt in this namespace; see `CollisionWalk`.
    """

    namespace: Namespace
    tokens: bytes
    invoked: str
    path: list[tuple[int, str]]
    numbers: list[int]


class CollisionWalk:
    """A cache, and for each slot of its blocks the number of the namespace and prefix whose K/V it holds.

    The same few prompts are used in all namespaces, so that a reuse across two of them would be possible. Some of these
    prompts are public for a time. Some prompts of the base model invoke an adapter: the prefixes before the invocation
    have the same numbers as without it, and the prefixes after it have other numbers for each adapter.

    Args:
        seed: seed of the random operations.
        num_namespaces: number of namespaces.
        listeners, marks: arguments of the cache.

    Attributes:
        events: kinds of events, each with its count; those of `WRONG` must stay 0.
        slots: `[num_blocks, block_size]`, the number that each slot holds; -1 before the first write.
        public: the public prefixes that prompts match, by name.
    """

    def __init__(
        self,
        seed: int,
        num_namespaces: int = 40,
        *,
        listeners: Iterable[Listener] = (),
        marks: InvocationMarks | None = None,
    ) -> None:
        self.random = random.Random(seed)
        base_namespaces = [each for each in NAMESPACES if (each.model, each.adapter) == ("model", "")]
        chosen = self.random.sample(NAMESPACES, num_namespaces // 2)
        chosen += self.random.sample(base_namespaces, num_namespaces // 2)
        self.namespaces = list(dict.fromkeys(chosen))
        stems = [self._random_ids(_MAX_TOKENS) for _ in range(4)]
        self.prompts = [
            (self.random.choice(stems)[: self.random.randrange(_MAX_TOKENS)] + self._random_ids(9))[:_MAX_TOKENS]
            for _ in range(_NUM_PROMPTS)
        ]
        quotas = {tenant: Quota(uses_public_prefixes=False) for tenant in _OPTED_OUT}
        self.cache = PrefixCache(
            _NUM_BLOCKS,
            _BLOCK_SIZE,
            max_retained_blocks=60,
            max_public_blocks=30,
            quotas=quotas,
            listeners=listeners,
            marks=marks,
        )
        for digest in INVOKED:
            self.cache.marks.add(digest)
        self.slots = np.full((_NUM_BLOCKS, _BLOCK_SIZE), -1)
        self.events: Counter[str] = Counter()
        self.public: dict[str, PublicPrefix] = {}
        self._open_leases: deque[tuple[Lease, np.ndarray]] = deque()  # each with the numbers that its slots hold
        # The number of a prefix, by the number of the prefix before it and its last step.
        self._numbers: dict[tuple[int, tuple[int, str]], int] = {}

    def run(self, num_operations: int) -> None:
        """Perform random operations, and release everything."""
        self.perform(num_operations)
        self.cache.check()
        self._close_leases(0)
        for name in list(self.public):
            self._unregister(name)
        self.cache.purge()
        self.cache.check()
        self.events["lost blocks"] += _NUM_BLOCKS - self.cache.pool.num_free

    def perform(self, num_operations: int) -> None:
        """Perform random operations."""
        weights: dict[Callable[[], None], int] = {
            self._prefill: 70,
            self._match: 20,
            self._evict: 4,
            self._retain: 4,
            self._purge: 1,
            self._drain: 1,
            self._register: 3,
            self._unregister: 1,
        }
        for operation in self.random.choices(list(weights), list(weights.values()), k=num_operations):
            operation()

    def _prefill(self) -> None:
        prompt = self._choose_prompt()
        try:
            lease = self.cache.lease(prompt.namespace, prompt.tokens)
        except CapacityError:
            return
        self._copy(lease)
        num_public = self._judge_reuse(lease.block_ids, prompt, lease.cached_tokens)
        self.events["miscounted public tokens"] += lease.public_tokens > num_public
        self.events["right reuses of public tokens"] += lease.public_tokens > 0
        self._write(lease, prompt.numbers)
        lease.commit(self.random.choice((len(prompt.numbers), self.random.randint(0, len(prompt.numbers)))))
        self._open_leases.append((lease, self._read(lease.block_ids, lease.num_tokens).copy()))
        self._close_leases(self.random.choice((0, 4, 12, 12, 24)))

    def _close_leases(self, num_leases: int) -> None:
        """Close all open leases except the latest ones, and check that no other lease has written their blocks."""
        while len(self._open_leases) > num_leases:
            lease, numbers = self._open_leases.popleft()
            present_numbers = self._read(lease.block_ids, numbers.size)
            self.events["changes under a lease"] += not np.array_equal(numbers, present_numbers)
            lease.close()

    def _match(self) -> None:
        prompt = self._choose_prompt()
        match = self.cache.match(prompt.namespace, prompt.tokens)
        self._judge_reuse(match.block_ids, prompt, match.cached_tokens)
        former = [PromptKey(each, prompt.tokens) for each in self.random.sample(self.namespaces, 2)]
        self.cache.explain(prompt.namespace, prompt.tokens, match.cached_tokens, former)

    def _judge_reuse(self, block_ids: np.ndarray, prompt: _Prompt, cached_tokens: int) -> int:
        """Count events by which namespaces wrote the reused tokens. Returns how many of these tokens are public."""
        reused_numbers = self._read(block_ids, cached_tokens).tolist()
        public_numbers = [
            self._prefix_numbers(prefix.namespace.salt, prompt.path)
            for prefix in self._usable_prefixes(prompt.namespace)
        ]
        is_public: list[bool] = []  # of each reused token
        is_right = True
        for position, number in enumerate(reused_numbers):
            is_public.append(any(numbers[position] == number for numbers in public_numbers))
            is_right = is_right and (is_public[-1] or number == prompt.numbers[position])
        own_positions = [position for position in range(cached_tokens) if not is_public[position]]
        self.events["reused tokens"] += cached_tokens
        self.events["reuses"] += cached_tokens > 0
        self.events["right reuses below public tokens"] += is_right and bool(own_positions) and True in is_public
        if is_right and cached_tokens:
            _, adapter_of_last_token = prompt.path[cached_tokens - 1]
            self.events["right reuses by an invoked adapter"] += bool(adapter_of_last_token)
        self.events["cross-namespace reuses"] += not is_right
        last_positions = list(range(cached_tokens - len(own_positions), cached_tokens))
        self.events["own tokens before public ones"] += own_positions != last_positions
        return sum(is_public)

    def _usable_prefixes(self, namespace: Namespace) -> list[PublicPrefix]:
        """Return the public prefixes that prompts of a namespace may reuse."""
        if namespace.tenant in _OPTED_OUT:
            return []
        key = namespace.model, namespace.adapter
        return [each for each in self.public.values() if (each.namespace.model, each.namespace.adapter) == key]

    def _evict(self) -> None:
        self.events["evicted blocks"] += self.cache.evict(self.random.randint(1, 40))

    def _retain(self) -> None:
        prompt = self._choose_prompt()
        self.cache.retain(prompt.namespace, prompt.tokens, Retention(self.random.choice((20, 50, 80)), None))

    def _register(self) -> None:
        """Make a prompt public. Some prefixes are unregistered while they are computed, and some cannot be computed."""
        name, prompt = self.random.choice(NAMES[1:]), self._choose_prompt()
        try:
            model, adapter = prompt.namespace.model, prompt.namespace.adapter
            prefix = self.cache.public.register(name, model, adapter, prompt.tokens, invoked=prompt.invoked)
        except (CapacityError, InvalidRequest) as error:
            self.events["public prefixes refused for lack of blocks"] += isinstance(error, CapacityError)
            return
        outcome = self.random.choice(("kept", "kept", "kept", "unregistered", "failed"))
        try:
            with self.cache.lease(prefix.namespace, prompt.tokens) as lease:
                self.events["cross-namespace reuses"] += lease.cached_tokens > 0
                self._write(lease, self._prefix_numbers(prefix.namespace.salt, prompt.path))
                lease.commit(lease.num_tokens // 2 if outcome == "failed" else lease.num_tokens)
                if outcome == "unregistered":
                    self.cache.public.unregister(name)
        except CapacityError:
            outcome = "failed"
        self.events[f"public prefixes {outcome}"] += 1
        if outcome == "failed":
            self.cache.public.abandon(prefix)
            return
        with contextlib.suppress(UnknownPublicPrefix):
            self.cache.public.activate(prefix)
            self.public[name] = prefix

    def _unregister(self, name: str | None = None) -> None:
        if self.public:
            prefix = self.public.pop(self.random.choice(list(self.public)) if name is None else name)
            self.cache.public.unregister(prefix.name)
            self.events["public prefixes that drain"] += prefix.num_users > 0

    def _purge(self) -> None:
        namespace = self.random.choice(self.namespaces)
        named = {
            field: self.random.choice((None, getattr(namespace, field))) for field in ("tenant", "adapter", "salt")
        }
        is_checked = self.random.random() < 0.05  # a check takes long
        num_tokens_before = {each: self._num_tokens(each) for each in self.namespaces} if is_checked else {}
        self.events["purged blocks"] += self.cache.purge(**named).freed_blocks
        for each, num_tokens in num_tokens_before.items():
            is_named = all(name is None or name == getattr(each, field) for field, name in named.items())
            self.events["wrong purges"] += self._num_tokens(each) != (0 if is_named else num_tokens)
        if is_checked:
            for prefix in self.public.values():
                self.events["wrong purges"] += self._num_tokens(prefix.namespace) != prefix.num_tokens

    def _drain(self) -> None:
        digest = self.random.choice((DIGEST, DIGEST, *INVOKED))
        if digest in INVOKED:
            self._close_leases(0)  # blocks that leases use would stay
        all_slices(self.cache.purge_adapter_in_slices(digest))
        self.public = {name: each for name, each in self.public.items() if each.adapter != digest}
        cached_digests = {each.adapter for each in self.namespaces if self._num_tokens(each)}
        cached_digests |= {self.cache.marks.digest_of(node.tokens) for node in self.cache.nodes()}
        self.events["drains"] += 1
        self.events["wrong purges"] += digest in cached_digests
        self.events["wrong purges"] += [each.name for each in self.cache.public] != list(self.public)

    def _num_tokens(self, namespace: Namespace) -> int:
        """Count the cached tokens of a namespace, in its own tree and in its trees below public prefixes."""
        trees = [tree for each, tree in self.cache._trees.items() if each._replace(public_prefix="") == namespace]
        return sum(len(node.tokens) // 4 for tree in trees for node in tree.nodes())

    def _read(self, block_ids: np.ndarray, num_tokens: int) -> np.ndarray:
        """Return the numbers that the slots of the first tokens hold."""
        return self.slots[block_ids[: -(-num_tokens // _BLOCK_SIZE)]].ravel()[:num_tokens]

    def _copy(self, lease: Lease) -> None:
        if lease.copy is not None:
            self.slots[lease.copy.target] = self.slots[lease.copy.source]

    def _write(self, lease: Lease, numbers: list[int]) -> None:
        positions = np.arange(lease.cached_tokens, len(numbers))
        block_ids = lease.block_ids[positions // _BLOCK_SIZE]
        self.slots[block_ids, positions % _BLOCK_SIZE] = numbers[lease.cached_tokens :]

    def _choose_prompt(self) -> _Prompt:
        """Choose a namespace and a prompt, which may invoke an adapter if the namespace is one of a base model."""
        index, ids = self.random.randrange(len(self.namespaces)), self.random.choice(self.prompts)
        tokens, namespace, invoked = np.array(ids, dtype="<u4").tobytes(), self.namespaces[index], ""
        start = self.random.choice((0, 3, 5, 8, 13))
        if not namespace.adapter and start < len(ids) and self.random.random() < 0.5:
            invoked = self.random.choice(INVOKED)
            tokens = self.cache.marks.invocation(invoked, start).marked(tokens)
        path = [(token, invoked if position >= start else "") for position, token in enumerate(ids)]
        return _Prompt(namespace, tokens, invoked, path, self._prefix_numbers(index, path))

    def _random_ids(self, max_tokens: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(1, max_tokens))]

    def _prefix_numbers(self, writer: int | str, path: list[tuple[int, str]]) -> list[int]:
        """Return the number of each prefix of a path, as written in a namespace or for a public prefix.

        Args:
            writer: the index of the namespace, or the salt of the public prefix, which is a serial number.
            path: the tokens, each with the adapter that computes it.
        """
        before = -1 - writer if isinstance(writer, int) else -1000 - int(writer)  # of the empty prefix
        numbers = []
        for step in path:
            before = self._numbers.setdefault((before, step), len(self._numbers))
            numbers.append(before)
        return numbers


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
    return 1 if any(events[each] for each in WRONG) or not all(events[each] for each in WANTED) else 0


if __name__ == "__main__":
    sys.exit(main())
