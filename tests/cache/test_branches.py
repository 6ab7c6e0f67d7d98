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
from tests.fakes import MODEL, FakeClock, num_shared_tokens, publish, spell

OTHER = Namespace("model", "other")


class Published:
    """A cache in which prompts were published, each a second after the one before."""

    def __init__(self, *texts: str, block_size: int = 4, num_blocks: int = 4096) -> None:
        self.clock = FakeClock()
        self.cache = PrefixCache(num_blocks, block_size, clock=self.clock)
        for text in texts:
            self.publish(text)

    def publish(self, text: str, namespace: Namespace = MODEL) -> None:
        self.clock.now_s += 1
        publish(self.cache, text, namespace)

    def divergence(self, text: str, namespace: Namespace = MODEL) -> Divergence:
        return self.cache.divergence(namespace, spell(text))


def text_of(branch: CachedBranch, max_tokens: int = 10**6) -> str:
    return "".join(map(chr, np.frombuffer(branch.tokens(max_tokens), "<u4")))


def texts_of(divergence: Divergence) -> list[str]:
    return [text_of(each) for each in divergence.branches]


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
        divergence = published.divergence(prompt)
        left_at = max((num_shared_tokens(prompt, text) for text in texts), default=0)
        assert divergence.left_at == left_at
        continuations = {text[left_at:] for text in texts if num_shared_tokens(prompt, text) == left_at < len(text)}
        # A branch is followed to a leaf, so it is never the beginning of another one.
        whole_branches = set()
        for continuation in continuations:
            if not any(other != continuation and other.startswith(continuation) for other in continuations):
                whole_branches.add(continuation)
        assert set(texts_of(divergence)) <= whole_branches
        if len(whole_branches) <= MAX_BRANCHES:
            assert {branch[0] for branch in texts_of(divergence)} == {branch[0] for branch in whole_branches}
        num_with_branches += bool(whole_branches)
    assert num_with_branches > 50


@pytest.mark.parametrize("block_size", [1, 4])
def test_a_cached_prompt_that_no_other_request_used_is_explained_as_if_it_were_not_cached(block_size: int) -> None:
    rng = random.Random(block_size)
    for _ in range(100):
        texts = list({"".join(rng.choices("abc", k=rng.randrange(8, 24))) for _ in range(6)})
        prompt, others = texts[0], texts[1:]
        if any(other.startswith(prompt) or prompt.startswith(other) for other in others):
            continue
        uncached = Published(*others, block_size=block_size).divergence(prompt)
        cached = Published(*others, prompt, block_size=block_size).divergence(prompt)
        assert cached.left_at == uncached.left_at
        assert set(texts_of(cached)) == set(texts_of(uncached))


def test_own_tokens_begin_at_the_last_fork_even_if_no_use_of_the_tokens_before_it_was_counted() -> None:
    published = Published("abcdefgh1111", "abcdefgh2222")
    for node in published.cache.nodes():
        node.num_uses = 0  # as at the beginning of a path of very many nodes, where uses are not counted
    divergence = published.divergence("abcdefgh2222")
    assert (divergence.left_at, texts_of(divergence)) == (8, ["1111"])


def test_an_empty_cache_has_no_branches() -> None:
    assert Published().divergence("abcdef") == Divergence(0)


def test_a_prompt_that_continues_the_only_branch_diverges_from_none() -> None:
    assert Published("abcdef").divergence("abcdefghij") == Divergence(6)


def test_a_cached_prompt_that_a_second_request_used_diverges_from_no_branch() -> None:
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
    divergence = published.divergence("PUBLICPX")
    assert (divergence.left_at, texts_of(divergence)) == (7, [])


class TestBounds:
    """The work between two engine steps is counted, not timed."""

    def test_few_of_ten_thousand_siblings_are_compared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        published = Published(*(f"abcd{number:05d}" for number in range(10_000)), num_blocks=40_000)
        compared_blocks: list[bytes] = []
        shared_bytes = branches.shared_bytes

        def record_shared_bytes(segment: bytes, first_block: bytes, position: int) -> int:
            compared_blocks.append(first_block)
            return shared_bytes(segment, first_block, position)

        monkeypatch.setattr(branches, "shared_bytes", record_shared_bytes)
        divergence = published.divergence("abcdX")
        assert len(divergence.branches) == MAX_BRANCHES
        assert 256 <= divergence.num_examined_nodes <= MAX_EXAMINED_NODES
        assert len(compared_blocks) <= 256 + 2, "the latest siblings, and two neighbors of the prompt"
        assert all(len(first_block) <= 4 * TOKEN_BYTES for first_block in compared_blocks)

    @pytest.mark.parametrize("number", [0, 4999, 9999])
    def test_the_nearest_of_ten_thousand_siblings_is_found_however_old_it_is(self, number: int) -> None:
        """Prompts differ in their first five tokens, and blocks have eight, so siblings share a part of a block."""
        texts = [f"{index:05d}tail" for index in range(10_000)]
        published = Published(*texts, block_size=8, num_blocks=40_000)
        divergence = published.divergence(f"{number:05d}X")
        assert (divergence.left_at, texts_of(divergence)) == (5, ["tail"])
        own_divergence = published.divergence(texts[number])
        assert own_divergence.left_at == 4, "the prompt differs from its neighbor in the last digit"

    def test_a_deep_and_wide_tree_is_not_examined_completely(self) -> None:
        published = Published(block_size=1, num_blocks=60_000)
        stem = "s"
        for _ in range(300):
            for letter in "0123456789abcdefghijklmnopqrs":
                published.publish(stem + letter)
            stem += "t"
        divergence = published.divergence("X")
        assert 0 < divergence.num_examined_nodes <= MAX_EXAMINED_NODES

    def test_a_very_long_branch_is_not_copied(self) -> None:
        published = Published(num_blocks=300_000, block_size=4)
        published.publish("ab" + "c" * 1_000_000)
        (branch,) = published.divergence("aX").branches
        (node,) = published.cache.nodes()
        assert branch.runs[0] is node.tokens


def branches_of(published: Published, *numbers: int, tenant: str = "", **options: object) -> list[str]:
    return [text_of(each.branch) for each in published.cache.branches_at(numbers, tenant, **options)]


def number_of(published: Published, text: str, namespace: Namespace = MODEL) -> int:
    """Return the number of the node in which a published text ends."""
    numbers = []
    for node in published.cache.nodes():
        end_bytes = node.start_bytes + len(node.tokens)
        if node.owner.namespace == namespace and end_bytes == len(text) * TOKEN_BYTES:
            (found,) = published.cache.branches_at([node.segment_number], namespace.tenant)
            if text_of(found.branch, len(text)) == text:
                numbers.append(node.segment_number)
    (number,) = numbers
    return number


def test_a_branch_through_a_node_begins_at_the_root_and_ends_in_the_latest_leaf() -> None:
    published = Published("abcdefgh", "abcdefghijkl", "abcdefghmnop", "wxyz")
    shared = number_of(published, "abcdefgh")
    assert branches_of(published, shared) == ["abcdefghmnop"]
    assert branches_of(published, number_of(published, "abcdefghijkl")) == ["abcdefghijkl"]
    assert branches_of(published, number_of(published, "wxyz")) == ["wxyz"]


def test_a_node_on_a_branch_that_is_already_returned_adds_no_branch() -> None:
    published = Published("abcdefgh", "abcdefghijkl", "abcdefghmnop")
    shared, end = number_of(published, "abcdefgh"), number_of(published, "abcdefghijkl")
    assert branches_of(published, end, shared, end) == ["abcdefghijkl"]
    latest = number_of(published, "abcdefghmnop")
    assert branches_of(published, shared, latest, shared) == ["abcdefghmnop"]
    assert branches_of(published, shared, end, max_branches=1) == ["abcdefghmnop"]


@pytest.mark.parametrize("number", [-1, 10**6])
def test_a_number_without_a_node_has_no_branch(number: int) -> None:
    published = Published("abcdefgh")
    assert branches_of(published, number) == []


def test_segments_of_other_tenants_are_left_out() -> None:
    published = Published("abcdefgh")
    published.publish("abcdefgh", OTHER)
    numbers = [node.segment_number for node in published.cache.nodes()]
    for tenant, namespace in (("", MODEL), ("other", OTHER)):
        found = published.cache.branches_at(numbers, tenant)
        assert [each.namespace for each in found] == [namespace]


def test_the_latest_branches_of_a_session_come_first() -> None:
    published = Published("zzzzyyyy")
    for text in ("abcdefgh", "abcdijkl", "mnopqrst", "uvwxuvwx"):
        published.clock.now_s += 1
        with published.cache.lease(MODEL, spell(text), session_id="s") as lease:
            lease.commit(len(text))
    published.publish("abcd1234")  # so that the session does not own "abcd"
    other = number_of(published, "zzzzyyyy")
    found = published.cache.branches_at([other], "", "s")
    assert [text_of(each.branch) for each in found] == ["uvwxuvwx", "mnopqrst", "zzzzyyyy"]
    assert [each.session_id for each in found] == ["s", "s", ""]
    assert branches_of(published, other, session_id="unknown") == ["zzzzyyyy"]


def test_a_branch_is_named_after_the_session_of_its_end() -> None:
    published = Published("abcdefgh", "abcdefghmnop")
    published.clock.now_s += 1
    with published.cache.lease(MODEL, spell("abcdefghijkl"), session_id="s") as lease:
        lease.commit(12)
    (found,) = published.cache.branches_at([number_of(published, "abcdefgh")], "")
    assert (text_of(found.branch), found.session_id) == ("abcdefghijkl", "s")
