"""The trees in which prompts that begin with a public prefix are looked up and published."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Retention
from radixkv.cache.held_blocks import HeldPath
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.public_prefixes import PublicPrefix
from radixkv.cache.purge import all_slices
from radixkv.cache.tenants import Quota
from radixkv.errors import InvalidRequest, OutOfBlocks, QuotaExceeded, UnknownPublicPrefix
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES
from tests.fakes import spell

_BLOCK = 4  # tokens per block
_ACME, _OTHER = Namespace("model", "acme"), Namespace("model", "other")


def _cache(num_blocks: int = 64, **options: object) -> PrefixCache:
    return PrefixCache(num_blocks, _BLOCK, **options)  # type: ignore[arg-type]


def _make_public(cache: PrefixCache, tokens: bytes, name: str = "p", adapter: str = "") -> PublicPrefix:
    """Register a public prefix, compute it, and let prompts use it."""
    prefix = cache.public.register(name, "model", adapter, tokens)
    with cache.lease(prefix.namespace, tokens) as lease:
        lease.commit(lease.num_tokens)
    cache.public.activate(prefix)
    return prefix


def _serve(cache: PrefixCache, namespace: Namespace, tokens: bytes, *, read: bool = True) -> tuple[int, int]:
    """Compute a prompt and publish it. Returns the tokens that were reused, and those of them that were public."""
    with cache.lease(namespace, tokens, read=read) as lease:
        lease.commit(lease.num_tokens)
        return lease.cached_tokens, lease.public_tokens


def test_a_public_prefix_is_found_by_every_tenant_salt_and_to_the_token() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefghij"))
    assert _serve(cache, _ACME, spell("abcdefghijklm")) == (10, 10)
    assert _serve(cache, _OTHER._replace(salt="s"), spell("abcdefghijxyz")) == (10, 10)
    assert _serve(cache, _OTHER, spell("abcdefgxyz")) == (7, 7)
    assert _serve(cache, _OTHER, spell("abcdefghij")) == (9, 9)  # the last token is computed
    cache.check()


def test_a_single_token_can_be_public() -> None:
    cache = PrefixCache(8, block_size=1)
    assert _make_public(cache, spell("a")).num_tokens == 1
    assert _serve(cache, _ACME, spell("ab")) == (1, 1)
    cache.check()


def test_a_prompt_that_shares_less_than_a_block_stays_in_its_own_tree() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"))
    assert _serve(cache, _ACME, spell("abcxyz")) == (0, 0)
    assert _serve(cache, _ACME, spell("abcxyzw")) == (6, 0)


def test_a_commit_inside_the_prefix_publishes_nothing() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"))
    with cache.lease(_ACME, spell("abcdefghij")) as lease:
        assert lease.commit(3) == 0
        with pytest.raises(InvalidRequest, match=r"^upto_tokens: expected 0 to 10, got -1"):
            lease.commit(-1)
        assert lease.commit(10) == 2


def test_tokens_that_tenants_add_stay_their_own() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"))
    _serve(cache, _ACME, spell("abcdefghSECRETS"))
    assert _serve(cache, _ACME, spell("abcdefghSECRETS")) == (14, 8)
    assert _serve(cache, _ACME._replace(salt="s"), spell("abcdefghSECRETS")) == (8, 8)
    assert _serve(cache, _OTHER, spell("abcdefghSECRETS")) == (8, 8)
    assert cache.match(_ACME._replace(model="else"), spell("abcdefghSECRETS")).cached_tokens == 0
    assert cache.match(_ACME._replace(adapter="else"), spell("abcdefghSECRETS")).cached_tokens == 0


def test_the_blocks_of_the_prefix_exist_once_for_a_hundred_tenants() -> None:
    cache, tokens = _cache(600), spell("abcdefghijklmnop")
    _make_public(cache, tokens)
    leases = [cache.lease(Namespace("model", f"t{number}"), tokens + spell("xyz!")) for number in range(100)]
    assert len({tuple(lease.block_ids[:4]) for lease in leases}) == 1
    assert cache.pool.num_blocks - cache.pool.num_free == 4 + 100
    for lease in leases:
        lease.close()
    cache.check()


def test_tokens_cached_before_a_registration_are_used_while_they_are_longer() -> None:
    cache = _cache()
    _serve(cache, _ACME, spell("abcdefghijklmnop"))
    _make_public(cache, spell("abcdefgh"))
    assert _serve(cache, _ACME, spell("abcdefghijklmnopq")) == (16, 0)
    assert _serve(cache, _ACME, spell("abcdefghiXYZ")) == (9, 0)
    assert _serve(cache, _ACME, spell("abcdefghQ")) == (8, 8)


def test_of_two_public_prefixes_the_longer_share_counts() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"), "short")
    _make_public(cache, spell("abcdefghijkl"), "long")
    assert _serve(cache, _ACME, spell("abcdefghijklm")) == (12, 12)
    assert _serve(cache, _ACME, spell("abcdefghXYZ")) == (8, 8)


def test_a_tenant_can_opt_out() -> None:
    cache = _cache(quotas={"acme": Quota(uses_public_prefixes=False)})
    _make_public(cache, spell("abcdefgh"))
    assert _serve(cache, _ACME, spell("abcdefghij")) == (0, 0)
    assert _serve(cache, _OTHER, spell("abcdefghij")) == (8, 8)


def test_a_prompt_whose_adapter_begins_inside_uses_the_prefix_of_the_model_up_to_there() -> None:
    cache = _cache()
    cache.marks.add("c0ffee")
    _make_public(cache, spell("abcdefghij"))
    late, early = (cache.marks.invocation("c0ffee", start).marked(spell("abcdefghijklm")) for start in (9, 3))
    assert _serve(cache, _ACME, late) == (9, 9)
    assert _serve(cache, _ACME, late) == (12, 8)
    assert _serve(cache, _ACME, early) == (0, 0)
    cache.check()


def test_a_prefix_in_which_an_adapter_is_invoked_serves_the_model_up_to_there() -> None:
    cache = _cache()
    cache.marks.add("c0ffee")
    tokens = cache.marks.invocation("c0ffee", 6).marked(spell("abcdefghij"))
    prefix = cache.public.register("invoked", "model", "", tokens, invoked="c0ffee")
    with cache.lease(prefix.namespace, tokens) as lease:
        lease.commit(10)
    cache.public.activate(prefix)
    assert _serve(cache, _ACME, spell("abcdefghijk")) == (6, 6)
    assert _serve(cache, _OTHER, cache.marks.invocation("c0ffee", 6).marked(spell("abcdefghijk"))) == (10, 10)
    all_slices(cache.purge_adapter_in_slices("c0ffee"))
    assert not list(cache.public)
    cache.check()


def test_a_prompt_that_does_not_read_the_cache_computes_the_prefix_too() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"))
    assert _serve(cache, _ACME, spell("abcdefghij"), read=False) == (0, 0)


def test_a_generation_grows_below_the_prefix_and_is_found_again() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"))
    with cache.lease(_ACME, spell("abcdefghi"), num_expected_tokens=14) as lease:
        lease.commit(9)
        lease.reserve(14)
        lease.extend(spell("jklm"))
        assert bytes(lease.tokens) == spell("abcdefghijklm")
        assert (lease.num_tokens, lease.commit(13), lease.committed_tokens) == (13, 4, 13)
        assert lease.written_from_tokens == 8
    assert cache.match(_ACME, spell("abcdefghijklmno")).cached_tokens == 13
    cache.check()


def test_the_next_turn_of_a_prompt_that_ends_with_a_block_finds_its_answer() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefghijkl"))
    with cache.lease(_ACME, spell("abcdefgh")) as lease:
        lease.commit(8)
        lease.extend(spell("ANSWER"))
        lease.commit(14)
        assert (lease.cached_tokens, lease.public_tokens) == (7, 7)
    assert _serve(cache, _ACME, spell("abcdefghANSWERmore")) == (14, 4)
    assert _serve(cache, _OTHER, spell("abcdefghANSWERmore")) == (8, 8)
    assert _serve(cache, _ACME, spell("abcdefghijANS")) == (10, 10)
    cache.check()


def test_trees_below_a_short_prefix_are_found_when_a_longer_one_is_registered() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"), "short")
    assert _serve(cache, _ACME, spell("abcdefghijOWN")) == (8, 8)
    _make_public(cache, spell("abcdefghij"), "long")
    assert _serve(cache, _ACME, spell("abcdefghijOWNmore")) == (13, 8)
    assert _serve(cache, _OTHER, spell("abcdefghijOWNmore")) == (10, 10)
    cache.check()


def test_trees_below_more_of_a_prefix_are_not_found_by_prompts_that_share_less() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefghijkl"))
    assert _serve(cache, _ACME, spell("abcdefghijklOWNmore")) == (12, 12)
    assert _serve(cache, _ACME, spell("abcdeXXXXXXXOWNmore")) == (5, 5)
    cache.check()


def test_a_held_lease_keeps_its_own_blocks_and_the_prefix_until_it_is_closed() -> None:
    cache = _cache()
    prefix = _make_public(cache, spell("abcdefgh"))
    lease = cache.lease(_ACME, spell("abcdefghijk"))
    lease.commit(11)
    paths: list[tuple[HeldPath, int]] = []
    cache.lease(_ACME, spell("abcdefghijk"), require_path=lambda *path: paths.append(path)).close()
    assert paths == [(HeldPath(lease.node, 2, 3), 1)]
    lease.hold()
    cache.public.unregister("p")
    assert (prefix.num_users, cache.public.num_blocks) == (1, 2)
    cache.check()
    lease.close()
    lease.close()
    assert (prefix.num_users, cache.public.num_blocks) == (0, 0)
    cache.check()


def test_misses_below_a_prefix_are_explained() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"))
    assert cache.explain(_ACME, spell("abcdefghijkl"), 8) is MissReason.COLD
    _serve(cache, _ACME, spell("abcdefghijkl"))
    cache.evict(1)
    assert cache.explain(_ACME, spell("abcdefghijkl"), 8) is MissReason.EVICTED


def test_a_retention_counts_public_tokens_as_granted_and_keeps_the_others() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"))
    _serve(cache, _ACME, spell("abcdefghijkl"))
    assert cache.retain(_ACME, spell("abcdefghijkl"), Retention(priority=80, start=2))[:3] == (10, 0, 0)
    assert cache.num_retained_blocks == 1
    assert cache.retain(_ACME, spell("abcdefghijkl"), Retention(priority=80, end=8))[:3] == (8, 0, 0)
    assert cache.retain(_ACME, spell("abcdefghXY"), Retention(priority=80))[:3] == (8, 0, 2)
    cache.check()


def test_a_purge_of_a_tenant_removes_the_trees_below_and_leaves_the_prefix() -> None:
    cache = _cache()
    _make_public(cache, spell("abcdefgh"))
    _serve(cache, _ACME, spell("abcdefghijkl"))
    assert cache.purge(tenant="acme").freed_blocks == 1
    assert _serve(cache, _ACME, spell("abcdefghijkl")) == (8, 8)
    cache.purge()
    assert _serve(cache, _ACME, spell("abcdefghijkl")) == (8, 8)
    cache.check()


def test_a_full_pool_refuses_a_prompt_that_needs_a_block_after_the_prefix() -> None:
    cache = _cache(3, max_public_blocks=3)
    _make_public(cache, spell("abcdef"))
    with cache.lease(_ACME, spell("abcdefg")) as lease:
        assert (lease.cached_tokens, lease.public_tokens) == (6, 6)
        with pytest.raises(OutOfBlocks):
            cache.lease(_OTHER, spell("abcdefg"))
    cache.check()


_PROMPT = spell("abcdefghijklmnopqrst12345678zzzz")  # 32 tokens, 8 blocks


def _full_of_duplicates(num_blocks: int, **options: object) -> PrefixCache:
    """Return a cache in which a tenant has 5 blocks of a prompt, of which the first 4 then became public."""
    cache = _cache(num_blocks, max_public_blocks=4, **options)
    _serve(cache, _ACME, _PROMPT[: 20 * TOKEN_BYTES])
    _make_public(cache, _PROMPT[: 16 * TOKEN_BYTES])
    return cache


def test_a_prompt_for_which_there_is_room_only_with_the_public_prefix_is_leased_there() -> None:
    cache = _full_of_duplicates(10)
    assert cache.match(_ACME, _PROMPT).cached_tokens == 20
    with cache.lease(_ACME, _PROMPT) as lease:
        assert (lease.cached_tokens, lease.public_tokens, lease.found_tokens) == (16, 16, 20)
        cache.check()
        lease.commit(lease.num_tokens)
    assert _serve(cache, _ACME, _PROMPT) == (31, 16)
    with pytest.raises(OutOfBlocks, match=r"^blocks: expected enough of the pool's "):
        cache.lease(_ACME, _PROMPT + spell("y" * 9))
    cache.check()


def test_a_prompt_that_fits_everywhere_reuses_the_most() -> None:
    cache = _full_of_duplicates(12)
    with cache.lease(_ACME, _PROMPT) as lease:
        assert (lease.cached_tokens, lease.public_tokens) == (20, 0)


def test_a_prompt_that_stays_below_a_ceiling_only_with_the_public_prefix_is_leased_there() -> None:
    cache = _full_of_duplicates(32, quotas={"acme": Quota(ceiling_blocks=6)})
    with cache.lease(_ACME, _PROMPT) as lease:
        assert lease.public_tokens == 16
    cache.check()


def test_private_blocks_count_when_it_is_decided_where_a_prompt_is_leased() -> None:
    cache = _full_of_duplicates(32, quotas={"acme": Quota(ceiling_blocks=8)})
    with cache.lease(_ACME, _PROMPT, num_private_blocks=1) as lease:
        assert lease.public_tokens == 16
        lease.reserve_private(_BLOCK)
        cache.check()
    with pytest.raises(QuotaExceeded):
        cache.lease(_ACME, _PROMPT, num_private_blocks=5)


def test_a_lease_that_may_be_held_only_with_the_public_prefix_is_opened_there() -> None:
    cache = _full_of_duplicates(32)

    def require_room(path: HeldPath, _: int) -> None:
        if cache.held.num_blocks_to_add([path]) > 4:
            raise QuotaExceeded("hold_lease: expected at most 4 blocks")

    with cache.lease(_ACME, _PROMPT, require_path=require_room) as lease:
        assert lease.public_tokens == 16
    with pytest.raises(QuotaExceeded, match=r"^hold_lease"):
        cache.lease(_ACME, _PROMPT + spell("y"), require_path=require_room)
    cache.check()


class _Walk:
    """Random prompts of several namespaces, while public prefixes are registered and unregistered.

    Attributes:
        slots: by block id and offset: the tokens up to this slot, and the namespace of the request that wrote it.
        public: the tokens of each registered prefix, by name.
        num_public_tokens, num_own_tokens: reused tokens of public prefixes, and of the requests' own namespaces.
    """

    def __init__(self, seed: int, num_blocks: int) -> None:
        self.random = random.Random(seed)
        self.cache = _cache(num_blocks, max_public_blocks=num_blocks // 3)
        self.slots: dict[tuple[int, int], tuple[bytes, Namespace]] = {}
        self.public: dict[str, bytes] = {}
        self.num_public_tokens = self.num_own_tokens = 0

    def make_prompt(self) -> bytes:
        stem = "".join(self.random.choice("ab") for _ in range(self.random.choice((0, 4, 9, 16))))
        return spell(stem + "".join(self.random.choice("abc") for _ in range(self.random.randint(1, 9))))

    def write(self, lease: Lease, writer: Namespace, start: int, end: int) -> None:
        """Make the pending copy of a block, and compute the tokens `[start, end)`."""
        if lease.copy is not None:
            for offset in range(_BLOCK):
                source = self.slots.get((lease.copy.source, offset))
                if source is not None:
                    self.slots[lease.copy.target, offset] = source
            lease.copy = None
        for position in range(start, end):
            slot = int(lease.block_ids[position // _BLOCK]), position % _BLOCK
            self.slots[slot] = bytes(lease.tokens[: (position + 1) * TOKEN_BYTES]), writer

    def verify(self, block_ids: npt.NDArray[np.int32], tokens: bytes, namespace: Namespace, num_tokens: int) -> None:
        """Assert that the first tokens of a prompt were written for the namespace, or as a public prefix."""
        for position in range(num_tokens):
            content, writer = self.slots[int(block_ids[position // _BLOCK]), position % _BLOCK]
            assert content == tokens[: (position + 1) * TOKEN_BYTES], "reused K/V of other tokens"
            assert writer in (namespace, Namespace("operator")), "reused K/V that another namespace wrote"

    def serve(self) -> None:
        namespace = Namespace("model", self.random.choice(("acme", "other", "")), "", self.random.choice(("", "s")))
        tokens = self.make_prompt()
        match = self.cache.match(namespace, tokens)
        self.verify(match.block_ids, tokens, namespace, match.cached_tokens)
        try:
            lease = self.cache.lease(namespace, tokens)
        except OutOfBlocks:
            return
        with lease:
            num_tokens_in_whole_blocks = lease.cached_tokens // _BLOCK * _BLOCK  # the others are not copied yet
            self.verify(lease.block_ids, tokens, namespace, num_tokens_in_whole_blocks)
            start = lease.cached_tokens
            while start < lease.num_tokens:
                end = min(lease.num_tokens, start + self.random.randint(1, 6))
                self.write(lease, namespace, start, end)
                lease.commit(end)
                start = end
            self.verify(lease.block_ids, tokens, namespace, lease.num_tokens)
            self.num_public_tokens += lease.public_tokens
            self.num_own_tokens += lease.cached_tokens - lease.public_tokens
            if self.random.random() < 0.3:
                more_tokens = self.make_prompt()
                try:
                    lease.extend(more_tokens)
                except OutOfBlocks:
                    return
                self.write(lease, namespace, start, lease.num_tokens)
                lease.commit(lease.num_tokens)
                self.verify(lease.block_ids, tokens + more_tokens, namespace, lease.num_tokens)

    def register(self) -> None:
        name, tokens = f"p{self.random.randrange(4)}", self.make_prompt()
        if name in self.public:
            self.cache.public.unregister(name)
            del self.public[name]
        if len(tokens) < _BLOCK * TOKEN_BYTES:
            return
        try:
            prefix = self.cache.public.register(name, "model", "", tokens)
            with self.cache.lease(prefix.namespace, tokens) as lease:
                self.write(lease, Namespace("operator"), lease.cached_tokens, lease.num_tokens)
                lease.commit(lease.num_tokens)
            self.cache.public.activate(prefix)
        except OutOfBlocks:
            if name in {each.name for each in self.cache.public}:
                self.cache.public.unregister(name)
            return
        self.public[name] = tokens

    def purge(self) -> None:
        self.cache.purge(tenant=self.random.choice(("acme", "other", "", None)))

    def step(self) -> None:
        self.random.choices((self.serve, self.register, self.purge), (40, 4, 1))[0]()
        self.cache.check()


@pytest.mark.parametrize("num_blocks", [12, 24, 400])
@pytest.mark.parametrize("seed", range(4))
def test_no_prompt_reuses_other_tokens_or_tokens_that_another_tenant_wrote(seed: int, num_blocks: int) -> None:
    walk = _Walk(seed, num_blocks)
    for _ in range(500):
        walk.step()
    assert walk.num_public_tokens > 40
    assert walk.num_own_tokens > 100


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(16, _BLOCK, max_public_blocks=4)


def test_an_unregistered_prefix_has_its_blocks_until_no_request_computes_it(cache: PrefixCache) -> None:
    prefix = cache.public.register("p", "model", "", spell("abcdefghijkl"))
    lease = cache.lease(prefix.namespace, prefix.tokens)
    lease.commit(8)
    cache.public.unregister("p")
    assert cache.public.num_blocks == 3
    with pytest.raises(OutOfBlocks, match=r"^public prefixes: expected at most 4 blocks"):
        cache.public.register("q", "model", "", spell("abcdefgh"))
    lease.close()
    cache.check()
    cache.public.abandon(prefix)
    assert cache.public.num_blocks == 0
    assert cache.pool.num_free == 16
    cache.check()


def test_a_prefix_that_was_unregistered_is_not_kept(cache: PrefixCache) -> None:
    prefix = cache.public.register("p", "model", "", spell("abcdefghijkl"))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(12)
    cache.public.unregister("p")
    with pytest.raises(UnknownPublicPrefix, match=r"^name: expected a registered public prefix"):
        cache.public.activate(prefix)
    assert cache.pool.num_free == 16
    cache.check()


def test_a_prefix_that_cannot_be_computed_is_unregistered(cache: PrefixCache) -> None:
    prefix = cache.public.register("p", "model", "", spell("abcdefgh"))
    with cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(4)
    cache.public.abandon(prefix)
    assert not list(cache.public)
    assert cache.pool.num_free == 16
    cache.check()
