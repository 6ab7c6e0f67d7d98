"""The cached branches from which a prompt diverges, compared with a plain list of the published prompts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixkv.api.explanation import CachedBranch, Divergence
from radixkv.cache import branches
from radixkv.cache.branches import MAX_BRANCHES, MAX_EXAMINED_NODES
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES
from tests.fakes import MODEL, FakeClock, publish, spell

OTHER = Namespace("model", "other")


class Published:
    """A cache with a clock, and the prompts that were published in it."""

    def __init__(self, *texts: str, block_size: int = 4, num_blocks: int = 4096) -> None:
        self.clock = FakeClock()
        self.cache = PrefixCache(num_blocks, block_size, clock=self.clock)
        self.texts: list[str] = []
        for text in texts:
            self.publish(text)

    def publish(self, text: str, namespace: Namespace = MODEL) -> None:
        self.clock.now_s += 1
        publish(self.cache, text, namespace)
        self.texts.append(text)

    def divergence(self, text: str, namespace: Namespace = MODEL) -> Divergence:
        return self.cache.divergence(namespace, spell(text))


def text_of(branch: CachedBranch, max_tokens: int = 10**6) -> str:
    return "".join(map(chr, np.frombuffer(branch.tokens(max_tokens), "<u4")))


def texts_of(divergence: Divergence) -> list[str]:
    return [text_of(each) for each in divergence.branches]


def num_shared(first: str, second: str) -> int:
    return next(
        (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_new_prompt_diverges_from_the_tree_where_it_diverges_from_a_list_of_prompts(block_size: int) -> None:
    rng = random.Random(block_size)
    num_with_branches = 0
    for _ in range(150):
        texts = ["".join(rng.choices("abc", k=rng.randrange(1, 24))) for _ in range(rng.randrange(12))]
        published = Published(*texts, block_size=block_size)
        prompt = "".join(rng.choices("abc", k=rng.randrange(1, 24)))
        if any(text.startswith(prompt) for text in texts):
            continue
        found = published.divergence(prompt)
        left_at = max((num_shared(prompt, text) for text in texts), default=0)
        assert found.left_at == left_at
        continuations = {text[left_at:] for text in texts if num_shared(prompt, text) == left_at < len(text)}
        maximal = {
            one for one in continuations if not any(other != one and other.startswith(one) for other in continuations)
        }
        assert set(texts_of(found)) <= maximal
        if len(maximal) <= MAX_BRANCHES:
            assert {each[0] for each in texts_of(found)} == {each[0] for each in maximal}
        num_with_branches += bool(maximal)
    assert num_with_branches > 50


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_prompt_that_only_it_has_used_is_explained_as_if_it_were_not_cached(block_size: int) -> None:
    rng = random.Random(block_size)
    for _ in range(100):
        texts = list({"".join(rng.choices("abc", k=rng.randrange(8, 24))) for _ in range(6)})
        prompt, others = texts[0], texts[1:]
        if any(other.startswith(prompt) or prompt.startswith(other) for other in others):
            continue
        before = Published(*others, block_size=block_size).divergence(prompt)
        after = Published(*others, prompt, block_size=block_size).divergence(prompt)
        assert after.left_at == before.left_at
        assert set(texts_of(after)) == set(texts_of(before))


def test_own_tokens_begin_at_the_last_fork_even_if_no_request_has_found_what_is_before_it() -> None:
    published = Published("abcdefgh1111", "abcdefgh2222")
    for node in published.cache.nodes():
        node.num_uses = 0  # as far above the end of a path of many nodes, where uses are not counted
    found = published.divergence("abcdefgh2222")
    assert (found.left_at, texts_of(found)) == (8, ["1111"])


def test_an_empty_cache_has_no_branches() -> None:
    assert Published().divergence("abcdef") == Divergence(0)


def test_a_prompt_that_continues_the_only_branch_diverges_from_none() -> None:
    assert Published("abcdef").divergence("abcdefghij") == Divergence(6)


def test_a_prompt_that_was_found_again_is_not_explained() -> None:
    published = Published("abcdXXXX", "abcdefgh", "abcdefgh")
    assert published.divergence("abcdefgh") == Divergence(8)


def test_the_only_prompt_diverges_from_no_branch() -> None:
    assert texts_of(Published("abcdefgh").divergence("abcdefgh")) == []


def test_the_most_recently_used_branches_come_first() -> None:
    published = Published("abcdefgh", "abXXXXXX", "abYYYYYY", "abZZZZZZ", "abUUUUUU")
    published.publish("abXXXXXX")
    assert texts_of(published.divergence("ab-"))[:2] == ["XXXXXX", "UUUUUU"]
    assert len(published.divergence("ab-").branches) == MAX_BRANCHES


def test_a_branch_follows_its_most_recently_used_end() -> None:
    published = Published("abcdefgh1111", "abcdefgh2222", "abcdefgh3333")
    published.publish("abcdefgh2222")
    assert texts_of(published.divergence("abcX")) == ["defgh2222"]


def test_of_equally_recent_ends_a_branch_follows_the_one_that_was_added_last() -> None:
    published = Published("abcdefgh1111", "abcdefgh2222", "abcdefgh3333")
    for node in published.cache.nodes():
        node.last_used_s = 1.0
    assert texts_of(published.divergence("abcX")) == ["defgh3333"]


def test_a_branch_follows_one_of_the_ends_that_were_added_last() -> None:
    published = Published(*(f"abcdefgh{number:04}" for number in range(17)))
    for node in published.cache.nodes():
        node.last_used_s = 100.0 if node.tokens == spell("0000") else node.last_used_s
    assert texts_of(published.divergence("abcX")) == ["defgh0016"]


def test_a_branch_reports_when_it_was_used() -> None:
    published = Published("abcdefgh")
    published.clock.now_s += 7
    assert published.divergence("abX").branches[0].idle_s == 7


def test_a_long_branch_is_cut_to_the_requested_length() -> None:
    (branch,) = Published("abcdefgh1111", "abcdefgh2222").divergence("abcX").branches
    assert [text_of(branch, length) for length in (0, 1, 7, 100)] == ["", "d", "defgh22", "defgh2222"]


def test_branches_of_other_namespaces_are_never_returned() -> None:
    published = Published("abcdefgh")
    for namespace in (OTHER, MODEL._replace(salt="s"), MODEL._replace(adapter="a")):
        published.publish("abcd" + namespace.tenant + namespace.salt + namespace.adapter + "secret", namespace)
    assert texts_of(published.divergence("abcdX")) == ["efgh"]
    assert texts_of(published.divergence("abcdX", OTHER)) == ["othersecret"]
    assert published.divergence("abcdX", Namespace("model", "third")) == Divergence(0)


def test_a_public_prefix_is_not_a_branch() -> None:
    published = Published()
    prefix = published.cache.public.register("rules", "model", "", spell("PUBLICPUBLIC"))
    with published.cache.lease(prefix.namespace, prefix.tokens) as lease:
        lease.commit(lease.num_tokens)
    published.cache.public.activate(prefix)
    published.publish("PUBLICPUBLIC and mine")
    assert texts_of(published.divergence("PUBLICPUBLIC and yours")) == ["mine"]
    left = published.divergence("PUBLICPX")
    assert (left.left_at, texts_of(left)) == (7, [])


class TestBounds:
    """The work between two engine steps is counted, not timed."""

    def test_ten_thousand_siblings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        published = Published(*(f"abcd{number:05d}" for number in range(10_000)), num_blocks=40_000)
        compared = []
        shared_bytes = branches.shared_bytes
        monkeypatch.setattr(branches, "shared_bytes", lambda *run: compared.append(run) or shared_bytes(*run))
        found = published.divergence("abcdX")
        assert len(found.branches) == MAX_BRANCHES
        assert 256 <= found.num_examined_nodes <= MAX_EXAMINED_NODES
        assert len(compared) <= 258
        assert all(len(first_block) <= 4 * TOKEN_BYTES for _, first_block, _ in compared)

    @pytest.mark.parametrize("number", [0, 4999, 9999])
    def test_the_nearest_of_ten_thousand_siblings_is_found_however_old_it_is(self, number: int) -> None:
        """Keys of five tokens in blocks of eight, so that siblings share a part of their first block."""
        texts = [f"{index:05d}tail" for index in range(10_000)]
        published = Published(*texts, block_size=8, num_blocks=40_000)
        found = published.divergence(f"{number:05d}X")
        assert (found.left_at, texts_of(found)) == (5, ["tail"])
        own = published.divergence(texts[number])  # it differs from its neighbor in the last digit
        assert own.left_at == 4

    def test_a_deep_and_wide_tree(self) -> None:
        published = Published(block_size=1, num_blocks=60_000)
        stem = "s"
        for _ in range(300):
            for letter in "0123456789abcdefghijklmnopqrs":
                published.publish(stem + letter)
            stem += "t"
        found = published.divergence("X")
        assert 0 < found.num_examined_nodes <= MAX_EXAMINED_NODES

    def test_a_very_long_branch_is_not_copied(self) -> None:
        published = Published(num_blocks=300_000, block_size=4)
        published.publish("ab" + "c" * 1_000_000)
        (branch,) = published.divergence("aX").branches
        (node,) = published.cache.nodes()
        assert branch.runs[0] is node.tokens


def branches_of(published: Published, *places: int, tenant: str = "", **options: object) -> list[str]:
    found = published.cache.branches_at(places, tenant, **options)
    return [text_of(each.branch) for each in found]


def place_of(published: Published, text: str, namespace: Namespace = MODEL) -> int:
    """Return the place of the node in which a published text ends."""
    (place,) = (
        node.place
        for node in published.cache.nodes()
        if node.owner.namespace == namespace
        and node.start_bytes + len(node.tokens) == len(text) * TOKEN_BYTES
        and "".join(
            text_of(each.branch, len(text)) for each in published.cache.branches_at([node.place], namespace.tenant)
        )
        == text
    )
    return place


def test_a_branch_through_a_place_begins_at_the_root_and_ends_in_the_latest_leaf() -> None:
    published = Published("abcdefgh", "abcdefghijkl", "abcdefghmnop", "wxyz")
    shared = place_of(published, "abcdefgh")
    assert branches_of(published, shared) == ["abcdefghmnop"]
    assert branches_of(published, place_of(published, "abcdefghijkl")) == ["abcdefghijkl"]
    assert branches_of(published, place_of(published, "wxyz")) == ["wxyz"]


def test_a_node_on_a_branch_that_is_returned_adds_none() -> None:
    published = Published("abcdefgh", "abcdefghijkl", "abcdefghmnop")
    shared, end = place_of(published, "abcdefgh"), place_of(published, "abcdefghijkl")
    assert branches_of(published, end, shared, end) == ["abcdefghijkl"]
    latest = place_of(published, "abcdefghmnop")
    assert branches_of(published, shared, latest, shared) == ["abcdefghmnop"]
    assert branches_of(published, shared, end, max_branches=1) == ["abcdefghmnop"]


@pytest.mark.parametrize("place", [-1, 10**6])
def test_a_place_without_a_node_has_no_branch(place: int) -> None:
    published = Published("abcdefgh")
    assert branches_of(published, place) == []


def test_places_of_other_tenants_are_left_out() -> None:
    published = Published("abcdefgh")
    published.publish("abcdefgh", OTHER)
    places = [node.place for node in published.cache.nodes()]
    for tenant, namespace in (("", MODEL), ("other", OTHER)):
        found = published.cache.branches_at(places, tenant)
        assert [each.namespace for each in found] == [namespace]


def test_the_latest_branches_of_a_session_come_first() -> None:
    published = Published("zzzzyyyy")
    for text in ("abcdefgh", "abcdijkl", "mnopqrst", "uvwxuvwx"):
        published.clock.now_s += 1
        with published.cache.lease(MODEL, spell(text), session_id="s") as lease:
            lease.commit(len(text))
    published.publish("abcd1234")  # so that the session does not own "abcd"
    other = place_of(published, "zzzzyyyy")
    found = published.cache.branches_at([other], "", "s")
    assert [text_of(each.branch) for each in found] == ["uvwxuvwx", "mnopqrst", "zzzzyyyy"]
    assert [each.session_id for each in found] == ["s", "s", ""]
    assert branches_of(published, other, session_id="unknown") == ["zzzzyyyy"]


def test_a_branch_is_named_after_the_session_of_its_end() -> None:
    published = Published("abcdefgh", "abcdefghmnop")
    published.clock.now_s += 1
    with published.cache.lease(MODEL, spell("abcdefghijkl"), session_id="s") as lease:
        lease.commit(12)
    (found,) = published.cache.branches_at([place_of(published, "abcdefgh")], "")
    assert (text_of(found.branch), found.session_id) == ("abcdefghijkl", "s")
