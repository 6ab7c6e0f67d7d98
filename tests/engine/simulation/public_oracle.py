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
    """Tokens that a prompt reuses: all of them, those of a public prefix, and those before its own tree."""

    cached_tokens: int
    public_tokens: int
    root_tokens: int


@dataclass(eq=False)
class PublicPrefixRecord:
    """A public prefix that an operator registered.

    Attributes:
        serial: the salt of its namespace.
        adapter, invoked: digests of the adapter that computes it, or of one that is invoked in it.
        is_found: it is computed, so that prompts match it.
        is_registered: it has not been unregistered.
        is_over: the request that computes it has ended.
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

    def registered(self, name: str, namespace: Namespace, tokens: bytes) -> PublicPrefixRecord:
        """Record that a prefix is being computed from now on."""
        record = self._records[namespace.salt] = PublicPrefixRecord(
            name, namespace.salt, namespace.adapter, self._cache.marks.digest_of(tokens), tokens
        )
        self._events["public prefixes"] += 1
        return record

    def computed(self, record: PublicPrefixRecord) -> None:
        """Record that prompts match a prefix, unless it was unregistered."""
        record.is_over, record.is_found = True, record.is_registered
        self._events["public prefixes computed"] += record.is_found

    def failed(self, record: PublicPrefixRecord) -> None:
        """Record that a prefix is no longer registered because it could not be computed."""
        self._events["public prefixes that failed"] += record.is_registered
        record.is_over, record.is_registered = True, False

    def has_room(self, num_tokens: int) -> bool:
        """Whether a prefix of this length may be registered: the others, with those in use or computed, leave room."""
        used = set(self._used())
        taking = [
            each for each in self._records.values() if each.is_registered or not each.is_over or each.serial in used
        ]
        num_blocks = sum(self._num_blocks(len(each.tokens) // TOKEN_BYTES) for each in taking)
        return num_blocks + self._num_blocks(num_tokens) <= self._max_blocks

    def by_name(self, name: str) -> PublicPrefixRecord | None:
        """Find a prefix that is registered under a name."""
        return next((each for each in self._records.values() if each.is_registered and each.name == name), None)

    def unregistered(self, record: PublicPrefixRecord) -> None:
        """Record that prompts no longer match a prefix."""
        self._events["public prefixes unregistered"] += 1
        self._events["public prefixes unregistered while they are computed"] += not record.is_over
        self._events["public prefixes that drain"] += record.serial in set(self._used())
        record.is_found = record.is_registered = False

    def adapter_gone(self, adapter: str) -> None:
        """Record that the prefixes of an adapter are unregistered with it."""
        for each in self._records.values():
            if each.is_registered and adapter in (each.adapter, each.invoked):
                self._events["public prefixes gone with an adapter"] += 1
                self.unregistered(each)

    def tokens_of(self, namespace: Namespace) -> bytes:
        """Return the tokens before all those of a namespace's tree."""
        serial, _, num_tokens = namespace.public_prefix.partition(":")
        return self._records[serial].tokens[: int(num_tokens) * TOKEN_BYTES] if serial else b""

    def reuse(self, namespace: Namespace, tokens: bytes) -> Reuse:
        """Compute what a prompt reuses if there is room, by looking at everything that is cached."""
        return max(self._reuses(namespace, tokens), key=lambda each: (each.cached_tokens, each.root_tokens))

    def _reuses(self, namespace: Namespace, tokens: bytes) -> list[Reuse]:
        """Compute what a prompt could reuse in each of its trees."""
        most = len(tokens) - TOKEN_BYTES
        found = [Reuse(self._in_tree(namespace, tokens, most), 0, 0)]
        for prefix in self._usable(namespace):
            shared = min(shared_bytes(prefix.tokens, tokens, 0), most)
            for end in range(self._block_bytes, shared + 1, self._block_bytes):
                own = namespace._replace(public_prefix=f"{prefix.serial}:{end // TOKEN_BYTES}")
                num_own = max(0, self._in_tree(own, tokens, most) - end // TOKEN_BYTES)
                num_more = min(shared - end, self._block_bytes) // TOKEN_BYTES
                num_root = end // TOKEN_BYTES
                num_public = num_root + (num_more if num_more > num_own else 0)
                found.append(Reuse(num_root + max(num_own, num_more), num_public, num_root))
        return found

    def lease(self, take: Callable[..., Lease], namespace: Namespace, tokens: bytes, **options: Any) -> Lease:
        """Take a lease, and assert that it reuses exactly what it can, and says how much of that is public."""
        expected = self.reuse(namespace, tokens) if options.get("read", True) else Reuse(0, 0, 0)
        usage, spared = self._cache.tenants[namespace.tenant], options.get("num_headroom_blocks", 0)
        num_takeable_before = self._cache._evictor.num_takeable_blocks(namespace.tenant, usage, spared)
        lease = take(namespace, tokens, **options)
        cached, public = lease.cached_tokens, lease.public_tokens
        size = self._cache.block_size
        if cached // size < expected.cached_tokens // size:  # it does not fit where the prompt has most
            assert num_takeable_before < -(-len(tokens) // self._block_bytes), "there was room for the whole prompt"
            others = [each for each in self._reuses(namespace, tokens) if each.cached_tokens < expected.cached_tokens]
            assert cached in {
                used for each in others for used in (each.cached_tokens, each.cached_tokens // size * size)
            }
            self._events["leased where there was room"] += 1
            return lease
        if cached != expected.cached_tokens:
            assert cached == expected.cached_tokens // size * size, (
                f"{expected.cached_tokens} tokens are cached, of which {cached} were reused"
            )
            takeable = self._cache._evictor.num_takeable_blocks(namespace.tenant, usage, spared)
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

    def verify(self, listed: list[PublicPrefixStatus]) -> None:
        """Assert that the list is right, that blocks are within bounds, and that public trees hold nothing else."""
        users = Counter(self._used())
        names = [each for each in self._records.values() if each.is_registered]
        assert [(each.name, each.num_tokens, each.is_computed, each.num_users) for each in listed] == [
            (each.name, len(each.tokens) // TOKEN_BYTES, each.is_found, users[each.serial]) for each in names
        ], "the list of public prefixes is wrong"
        usage = self._cache.tenants[PUBLIC_TENANT]
        assert usage.num_cached_blocks + usage.num_leased_blocks <= self._max_blocks, "too many blocks are public"
        for namespace, tree in self._cache._trees.items():
            self._events["trees below public prefixes"] += bool(namespace.public_prefix)
            if namespace.tenant == PUBLIC_TENANT:
                record = self._records[namespace.salt]
                assert record.is_registered or not record.is_over or users[record.serial], "an unused prefix is kept"
                assert all(record.tokens.startswith(tree.path_tokens(node)) for node in tree.nodes())

    def _usable(self, namespace: Namespace) -> Iterator[PublicPrefixRecord]:
        for each in self._records.values():
            is_theirs = namespace.tenant not in self._opted_out | {PUBLIC_TENANT}
            if each.is_found and is_theirs and each.adapter == namespace.adapter:
                yield each

    def _in_tree(self, namespace: Namespace, tokens: bytes, most: int) -> int:
        tree = self._cache._trees.get(namespace)
        paths = [] if tree is None else [tree.path_tokens(node) for node in tree.nodes()]
        longest = max((shared_bytes(path, tokens, 0) for path in paths), default=0)
        return min(longest, most) // TOKEN_BYTES

    def _used(self) -> Iterator[str]:
        """Yield the serial of the public prefix of each open lease."""
        for lease in self._cache.leases:
            if lease.namespace.public_prefix:
                yield lease.namespace.public_prefix.partition(":")[0]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.block_size)

    @property
    def _block_bytes(self) -> int:
        return self._cache.block_size * TOKEN_BYTES
