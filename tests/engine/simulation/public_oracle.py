"""An oracle of the public prefixes of a simulated engine, and of what each prompt must reuse according to the trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixkv.api.public_prefixes import PublicPrefixStatus
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import PUBLIC_TENANT, Namespace
from radixkv.tokens import TOKEN_BYTES, shared_bytes


class Reuse(NamedTuple):
    """Numbers of tokens that a prompt reuses: in total, of a public prefix, and of that before the root of its tree."""

    cached_tokens: int
    public_tokens: int
    root_tokens: int


@dataclass(eq=False)
class PublicPrefixRecord:
    """A public prefix that an operator registered.

    Attributes:
        serial: the salt of its namespace.
        adapter, invoked: digests of the adapter that computes it, or of one that is invoked in it.
        is_found: whether prompts match the prefix: it is computed, and still registered.
        is_registered: whether the prefix is registered.
        is_over: whether the request that computes the prefix has ended.
    """

    name: str
    serial: str
    adapter: str
    invoked: str
    tokens: bytes
    is_found: bool = False
    is_registered: bool = True
    is_over: bool = False


class PublicOracle:
    """Checks leases against the cached tokens, and the list of public prefixes against the events of operators.

    Args:
        cache: the cache to check.
        max_blocks: blocks that public prefixes may take.
        opted_out: tenants that use no public prefixes.
        events: counts what happened.
    """

    def __init__(self, cache: PrefixCache, max_blocks: int, opted_out: frozenset[str], events: Counter[str]) -> None:
        self._cache = cache
        self._max_blocks = max_blocks
        self._opted_out = opted_out
        self._events = events
        self._records: dict[str, PublicPrefixRecord] = {}  # by serial

    def record_registration(self, name: str, namespace: Namespace, tokens: bytes) -> PublicPrefixRecord:
        """Record that a prefix is being computed from now on."""
        record = self._records[namespace.salt] = PublicPrefixRecord(
            name, namespace.salt, namespace.adapter, self._cache.marks.digest_of(tokens), tokens
        )
        self._events["public prefixes"] += 1
        return record

    def record_computed(self, record: PublicPrefixRecord) -> None:
        """Record that prompts match a prefix, unless it was unregistered."""
        record.is_over, record.is_found = True, record.is_registered
        self._events["public prefixes computed"] += record.is_found

    def record_failure(self, record: PublicPrefixRecord) -> None:
        """Record that a prefix is no longer registered because it could not be computed."""
        self._events["public prefixes that failed"] += record.is_registered
        record.is_over, record.is_registered = True, False

    def has_room(self, num_tokens: int) -> bool:
        """Whether there are blocks for another prefix, besides those that are registered, being computed or in use."""
        used = set(self._used_serials())
        prefixes_with_blocks = [
            each for each in self._records.values() if each.is_registered or not each.is_over or each.serial in used
        ]
        num_blocks = sum(self._num_blocks(len(each.tokens) // TOKEN_BYTES) for each in prefixes_with_blocks)
        return num_blocks + self._num_blocks(num_tokens) <= self._max_blocks

    def by_name(self, name: str) -> PublicPrefixRecord | None:
        """Find a prefix that is registered under a name."""
        return next((each for each in self._records.values() if each.is_registered and each.name == name), None)

    def record_unregistration(self, record: PublicPrefixRecord) -> None:
        """Record that prompts no longer match a prefix."""
        self._events["public prefixes unregistered"] += 1
        self._events["public prefixes unregistered while they are computed"] += not record.is_over
        self._events["public prefixes that drain"] += record.serial in set(self._used_serials())
        record.is_found = record.is_registered = False

    def record_removed_adapter(self, adapter: str) -> None:
        """Record that the prefixes of an adapter are unregistered with it."""
        for each in self._records.values():
            if each.is_registered and adapter in (each.adapter, each.invoked):
                self._events["public prefixes gone with an adapter"] += 1
                self.record_unregistration(each)

    def tokens_of(self, namespace: Namespace) -> bytes:
        """Return the tokens of the public prefix below which the tree of a namespace is rooted."""
        serial, _, num_tokens = namespace.public_prefix.partition(":")
        return self._records[serial].tokens[: int(num_tokens) * TOKEN_BYTES] if serial else b""

    def reuse(self, namespace: Namespace, tokens: bytes) -> Reuse:
        """Return what a prompt must reuse if there is room, by comparing it with everything that is cached."""
        return max(self._reuses(namespace, tokens), key=lambda each: (each.cached_tokens, each.root_tokens))

    def _reuses(self, namespace: Namespace, tokens: bytes) -> list[Reuse]:
        """Return what a prompt could reuse in each tree that it may read."""
        max_bytes = len(tokens) - TOKEN_BYTES
        reuses = [Reuse(self._num_matched_tokens(namespace, tokens, max_bytes), 0, 0)]
        for prefix in self._usable_prefixes(namespace):
            shared = min(shared_bytes(prefix.tokens, tokens, 0), max_bytes)
            for end in range(self._block_bytes, shared + 1, self._block_bytes):
                own_namespace = namespace._replace(public_prefix=f"{prefix.serial}:{end // TOKEN_BYTES}")
                num_own_tokens = max(0, self._num_matched_tokens(own_namespace, tokens, max_bytes) - end // TOKEN_BYTES)
                num_copied_tokens = min(shared - end, self._block_bytes) // TOKEN_BYTES
                num_root_tokens = end // TOKEN_BYTES
                # After the root, the prompt continues in its own tree, or in a copy of the next public block.
                cached_tokens = num_root_tokens + max(num_own_tokens, num_copied_tokens)
                is_copied = num_copied_tokens > num_own_tokens
                public_tokens = cached_tokens if is_copied else num_root_tokens
                reuses.append(Reuse(cached_tokens, public_tokens, num_root_tokens))
        return reuses

    def lease(self, open_lease: Callable[..., Lease], namespace: Namespace, tokens: bytes, **options: Any) -> Lease:
        """Open a lease, and assert that it reuses exactly what it can, and that it counts the public tokens."""
        expected = self.reuse(namespace, tokens) if options.get("read", True) else Reuse(0, 0, 0)
        usage, num_headroom_blocks = self._cache.tenants[namespace.tenant], options.get("num_headroom_blocks", 0)
        num_takeable_before = self._cache._evictor.num_takeable_blocks(namespace.tenant, usage, num_headroom_blocks)
        lease = open_lease(namespace, tokens, **options)
        cached, public = lease.cached_tokens, lease.public_tokens
        size = self._cache.block_size
        if cached // size < expected.cached_tokens // size:  # no room in the tree in which most of the prompt is cached
            assert num_takeable_before < -(-len(tokens) // self._block_bytes), "there was room for the whole prompt"
            others = [each for each in self._reuses(namespace, tokens) if each.cached_tokens < expected.cached_tokens]
            possible_tokens = {each.cached_tokens for each in others}
            possible_tokens |= {num_tokens // size * size for num_tokens in possible_tokens}  # without a copied block
            assert cached in possible_tokens
            self._events["leased where there was room"] += 1
            return lease
        if cached != expected.cached_tokens:
            assert cached == expected.cached_tokens // size * size, (
                f"{expected.cached_tokens} tokens are cached, of which {cached} were reused"
            )
            takeable = self._cache._evictor.num_takeable_blocks(namespace.tenant, usage, num_headroom_blocks)
            assert takeable <= 0, "cached tokens were dropped although there were enough blocks"
            assert public in (0, expected.root_tokens)
            return lease
        assert public == expected.public_tokens, f"{expected.public_tokens} tokens are public, {public} were counted"
        self._events["opted out of public prefixes"] += namespace.tenant in self._opted_out and any(
            each.is_found and tokens.startswith(each.tokens[: self._block_bytes]) for each in self._records.values()
        )
        self._events["public tokens"] += public
        num_plain = self._cache.marks.num_plain(tokens)
        if num_plain < len(tokens) // TOKEN_BYTES:
            self._events["tokens reused before an invocation"] += min(cached, num_plain)
            self._events["tokens reused after an invocation"] += max(0, cached - num_plain)
            self._events["public tokens before an invocation"] += public
        self._events["own tokens below public ones"] += cached - public if public else 0
        return lease

    def verify(self, statuses: list[PublicPrefixStatus]) -> None:
        """Assert that the list is right, that blocks are within bounds, and that public trees hold nothing else."""
        users = Counter(self._used_serials())
        registered = [each for each in self._records.values() if each.is_registered]
        assert [(each.name, each.num_tokens, each.is_computed, each.num_users) for each in statuses] == [
            (each.name, len(each.tokens) // TOKEN_BYTES, each.is_found, users[each.serial]) for each in registered
        ], "the list of public prefixes is wrong"
        usage = self._cache.tenants[PUBLIC_TENANT]
        assert usage.num_cached_blocks + usage.num_leased_blocks <= self._max_blocks, "too many blocks are public"
        for namespace, tree in self._cache._trees.items():
            self._events["trees below public prefixes"] += bool(namespace.public_prefix)
            if namespace.tenant == PUBLIC_TENANT:
                record = self._records[namespace.salt]
                assert record.is_registered or not record.is_over or users[record.serial], "an unused prefix is kept"
                assert all(record.tokens.startswith(tree.path_tokens(node)) for node in tree.nodes())

    def _usable_prefixes(self, namespace: Namespace) -> Iterator[PublicPrefixRecord]:
        for each in self._records.values():
            is_theirs = namespace.tenant not in self._opted_out | {PUBLIC_TENANT}
            if each.is_found and is_theirs and each.adapter == namespace.adapter:
                yield each

    def _num_matched_tokens(self, namespace: Namespace, tokens: bytes, max_bytes: int) -> int:
        tree = self._cache._trees.get(namespace)
        paths = [] if tree is None else [tree.path_tokens(node) for node in tree.nodes()]
        longest = max((shared_bytes(path, tokens, 0) for path in paths), default=0)
        return min(longest, max_bytes) // TOKEN_BYTES

    def _used_serials(self) -> Iterator[str]:
        """Yield the serial of the public prefix of each open lease."""
        for lease in self._cache.leases:
            if lease.namespace.public_prefix:
                yield lease.namespace.public_prefix.partition(":")[0]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.block_size)

    @property
    def _block_bytes(self) -> int:
        return self._cache.block_size * TOKEN_BYTES
