"""The names that radixkv/cache/README.md declares stable exist, with these parameters; its examples are correct."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from radixkv.cache.changes import Listener
from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.cache.lease import Lease
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.config import EVICTION_POLICIES
from radixkv.namespace import Namespace

PAGE = Path(__file__).parents[2] / "radixkv" / "cache" / "README.md"
# The parameters of each function; a star precedes those that are given by name. More of these may be added, with
# defaults.
STABLE = {
    PrefixCache.__init__: "num_blocks block_size * policy quotas default_quota probation_share listeners clock",
    PrefixCache.match: "namespace tokens",
    PrefixCache.lease: "namespace tokens * read num_headroom_blocks num_expected_tokens session_id",
    PrefixCache.retain: "namespace tokens retention",
    PrefixCache.evict: "num_blocks * tenant",
    PrefixCache.purge: "* tenant adapter salt",
    PrefixCache.explain: "namespace tokens cached_tokens",
    PrefixCache.check: "",
    Lease.commit: "upto_tokens",
    Lease.extend: "tokens",
    Lease.reserve: "num_tokens",
    Lease.close: "",
    EvictionPolicy.key: "node",
    make_policy: "name num_blocks",
    Listener.used: "node num_bytes now_s",
    Listener.inserted: "leaf now_s",
    Listener.grown: "leaf num_new_blocks now_s",
    Listener.split: "lower last_used_s now_s",
    Listener.cut: "lower",
    Listener.joined: "uppers lower",
    Listener.evicted: "leaf num_blocks fingerprint reason now_s",
    Listener.purged: "node",
}


def test_the_examples_of_the_page_are_correct() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False)
    assert results.attempted > 15
    assert results.failed == 0


@pytest.mark.parametrize("function", STABLE, ids=lambda function: function.__qualname__)
def test_stable_parameters_exist_and_others_have_defaults(function: Any) -> None:
    positional, _, keyword_only = STABLE[function].partition("*")
    parameters = {name: each for name, each in inspect.signature(function).parameters.items() if name != "self"}
    by_position = [name for name, each in parameters.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert by_position[: len(positional.split())] == positional.split()
    assert set(keyword_only.split()) <= parameters.keys()
    for name in parameters.keys() - {*positional.split(), *keyword_only.split()}:
        assert parameters[name].default is not inspect.Parameter.empty, name


def test_stable_attributes_exist() -> None:
    cache = PrefixCache(num_blocks=4, block_size=4, clock=lambda: 7.0)
    assert (cache.num_evictable_blocks, cache.num_pinned_blocks, cache.num_evicted_blocks) == (0, 0, 0)
    with cache.lease(Namespace(model="m", tenant="t", adapter="a", salt="s"), bytes(20)) as lease:
        assert (lease.num_tokens, lease.cached_tokens, lease.committed_tokens, lease.copy) == (5, 0, 0, None)
        assert (bytes(lease.tokens), lease.block_ids.size) == (bytes(20), 2)
        lease.commit(5)
        (node,) = cache.nodes()
        assert (node.tokens, node.start_bytes, node.owner.namespace.tenant) == (bytes(20), 0, "t")
        assert node.block_ids == lease.block_ids.tobytes()
        assert node.parent is not None
        assert node.last_used_s == 7.0
    assert Quota(floor_blocks=1, ceiling_blocks=2).ceiling_blocks == 2


@pytest.mark.parametrize("name", ["adaptive", "lru", "slru", "lfu", "priority"])
def test_stable_policies_exist(name: str) -> None:
    assert name in EVICTION_POLICIES
    assert isinstance(make_policy(name, 8), EvictionPolicy)


def test_the_page_lists_all_stable_names_and_modules_that_exist() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("**Stable names.**")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    for function in STABLE:
        owner, _, name = function.__qualname__.rpartition(".")
        assert {owner} - {""} <= named
        assert name in named or owner == "Listener" or name == "__init__", function
    assert set(STABLE[PrefixCache.__init__].replace("*", "").split()) <= named
    assert set(EVICTION_POLICIES) <= named
    modules = re.findall(r"`(radixkv(?:\.\w+)+)`", section)
    assert len(modules) == 8
    for module in modules:
        importlib.import_module(module)
