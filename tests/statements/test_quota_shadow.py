"""Estimates of what twice a ceiling would have saved, compared with replays through the cache."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from radixkv.api.statement import Use
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.statements import quota_shadow
from radixkv.statements.quota_shadow import PrefixHashes, QuotaShadow, QuotaShadows, ShadowRequest
from tests.fakes import FakeClock, spell
from tests.statements.conversations import POLICIES, SIZE, conversations, estimated_share, true_share


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("seed", "ceiling_blocks"), [(1, 1500), (2, 3000)])
def test_an_estimate_is_within_a_hundredth_of_a_replay(
    monkeypatch: pytest.MonkeyPatch, seed: int, ceiling_blocks: int, policy: str
) -> None:
    prompts = conversations(seed, 2500)
    truth = true_share(prompts, ceiling_blocks, policy)
    assert truth > 0.05, "twice the ceiling saves a noticeable share"
    for max_sampled_blocks in (16_384, 3000):
        monkeypatch.setattr(quota_shadow, "MAX_SAMPLED_BLOCKS", max_sampled_blocks)
        shadow = QuotaShadow(ceiling_blocks, SIZE)
        assert estimated_share(prompts, shadow, seed) == pytest.approx(truth, abs=0.01)
        assert shadow._large.max_blocks <= max_sampled_blocks
        assert len(shadow._small.blocks) + len(shadow._large.blocks) <= 3 * max_sampled_blocks / 2


def test_a_hash_is_that_of_a_token_and_of_all_tokens_before_it() -> None:
    hashes = PrefixHashes()
    first = hashes.compute(spell("abcd"), 1).tolist()
    assert len(first) == 4
    assert hashes.compute(spell("abcx"), 1).tolist()[:3] == first[:3]
    assert (
        hashes.compute(spell("abcd" + "x" * 20_000), 1).tolist()[:4] == first
    )  # a longer prompt draws more random factors
    different_hashes = [
        *hashes.compute(spell("abcx"), 1).tolist()[3:],
        *hashes.compute(spell("xbcd"), 1).tolist(),
        *hashes.compute(spell("abcd"), 2).tolist(),
        *PrefixHashes().compute(spell("abcd"), 1).tolist(),
    ]
    assert not set(different_hashes) & set(first)
    assert hashes.compute(b"", 1).size == 0


def test_every_low_bit_of_a_hash_depends_on_the_tokens() -> None:
    hashes = PrefixHashes().compute(np.arange(20_000, dtype="<u4").tobytes(), 0)
    for rate in (2, 8, 64):
        share = np.count_nonzero((hashes & np.uint64(rate - 1)) == 0) / hashes.size
        assert share == pytest.approx(1 / rate, rel=0.3)


def shadows_of(ceiling_blocks: int = 2) -> QuotaShadows:
    return QuotaShadows({"acme": ceiling_blocks}, 4)


def close_and_settle(shadows: QuotaShadows) -> int:
    """Replay everything, and return the tokens that `acme` is estimated to save with twice its ceiling."""
    shadows.close()
    ledger = TenantLedger(4, ["acme"], clock=FakeClock())
    shadows.settle(ledger)
    shadows.settle(ledger)  # nothing is counted twice
    assert ledger.use_of("acme")._replace(more_hit_tokens_at_twice_ceiling=0) == Use()
    return ledger.use_of("acme").more_hit_tokens_at_twice_ceiling


def request(text: str, num_read: int | None = None, num_written: int | None = None, seed: int = 0) -> ShadowRequest:
    """Make a request that may read and write this many tokens; all, if None."""
    num_read = len(text) if num_read is None else num_read
    num_written = len(text) if num_written is None else num_written
    return ShadowRequest(seed, spell(text), num_read, num_written)


def test_blocks_that_only_twice_the_ceiling_keeps_count() -> None:
    shadows = shadows_of()
    for text in (
        "aaaabbbb",
        "ccccdddd",
        "aaaabbbbe",
    ):  # the second prompt evicts the first one if two blocks are allowed
        shadows.put("acme", request(text))
    assert close_and_settle(shadows) == 8


def test_the_block_with_the_last_token_of_a_prompt_is_never_saved() -> None:
    shadows = shadows_of()
    for text in ("aaaabbbb", "ccccdddd", "aaaabbbb"):
        shadows.put("acme", request(text))
    assert close_and_settle(shadows) == 4


def test_the_beginning_of_a_prompt_is_kept_longest() -> None:
    shadows = shadows_of()
    for text in (
        "aaaabbbb",
        "ccccddddeeee",
        "aaaaffff",
    ):  # the first two prompts have five blocks, of which four are kept
        shadows.put("acme", request(text))
    assert close_and_settle(shadows) == 4


def test_a_partly_filled_block_takes_a_block_and_is_saved_if_the_prompt_continues() -> None:
    shadows = shadows_of(3)
    for text in ("aaaabbb", "ccccddddeeee", "aaaabbbbf"):
        shadows.put("acme", request(text))
    assert close_and_settle(shadows) == 4 + 3
    shadows = shadows_of(2)
    for text in (
        "aaaabbb",
        "ccccddd",
        "eeee",
        "aaaabbbf",
    ):  # there is no room for the partly filled block of the first prompt
        shadows.put("acme", request(text))
    assert close_and_settle(shadows) == 4


@pytest.mark.parametrize(("second", "expected"), [("aaaabbbb", 4), ("aaaaxxxx", 0)])
def test_a_longer_prompt_replaces_a_partly_filled_block_and_another_one_does_not(second: str, expected: int) -> None:
    shadows = shadows_of()
    for text in ("cccc", "aaaab", second, "dddd", "cccce"):  # four blocks, or five if that of "b" is not replaced
        shadows.put("acme", request(text))
    assert close_and_settle(shadows) == expected


def test_requests_that_read_or_write_nothing_count_as_such() -> None:
    shadows = shadows_of()
    shadows.put("acme", request("aaaabbbb", num_written=0))
    shadows.put("acme", request("ccccdddd"))
    shadows.put("acme", request("aaaabbbbe"))
    shadows.put("acme", request("ccccddddf", num_read=0))
    assert close_and_settle(shadows) == 0


def test_namespaces_share_nothing() -> None:
    shadows = shadows_of()
    for text, seed in (("aaaabbbb", 1), ("ccccdddd", 1), ("aaaabbbbe", 2)):
        shadows.put("acme", request(text, seed=seed))
    assert close_and_settle(shadows) == 0


def test_only_tenants_with_a_ceiling_have_shadows() -> None:
    shadows = shadows_of()
    assert [shadows.has(tenant) for tenant in ("acme", "other")] == [True, False]
    shadows.close()


def test_requests_beyond_the_bound_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quota_shadow, "_MAX_WAITING_BYTES", quota_shadow._REQUEST_BYTES + 1)
    shadows = shadows_of()
    with shadows._lock:
        monkeypatch.setattr(shadows, "_num_waiting_bytes", 2)  # so that there is no room for another request
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            shadows.put("acme", request(""))
    assert shadows.num_dropped == 2
    assert len(caplog.records) == 1
    assert "acme" not in caplog.text
    shadows.close()
