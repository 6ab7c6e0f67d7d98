from __future__ import annotations

import pytest
import torch

from bench.compression.__main__ import measure
from bench.compression.reading import BLOCK_SIZE, Readings
from bench.parts.quality import PoolText, held_out_texts, load
from radixkv.api.compression import Compression, CompressionPolicy

pytestmark = pytest.mark.long

STREAMING_LLM, H2O, SNAPKV = CompressionPolicy
PROMPT, NEW = 40, 24


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    return held_out_texts("tiny", 2, PROMPT + NEW)


@pytest.fixture(scope="module")
def readings(texts: list[torch.Tensor]) -> Readings:
    return Readings(load("tiny"), texts, PROMPT)


@pytest.mark.long
def test_the_whole_is_read_as_if_nothing_were_compressed(readings: Readings, texts: list[torch.Tensor]) -> None:
    read = readings.read(None)
    for logits, ids in zip(read.logits, texts, strict=True):
        assert torch.equal(logits, PoolText(load("tiny"), "auto", PROMPT + NEW).append(ids)[PROMPT:])
    assert read.blocks == (PROMPT + NEW) / BLOCK_SIZE


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("policy", CompressionPolicy)
def test_a_smaller_budget_holds_less_and_says_something_else(readings: Readings, policy: CompressionPolicy) -> None:
    whole = readings.read(None)
    roomy, tight = (readings.read(Compression(policy, budget)) for budget in (PROMPT + NEW, 16))
    assert torch.equal(roomy.logits, whole.logits)
    assert tight.blocks < whole.blocks
    assert not torch.equal(tight.logits, whole.logits)


def test_numbers_of_positions_do_not_matter_where_all_are_moved(readings: Readings) -> None:
    """Scores depend on distances alone, and without sinks all distances stay."""
    asked = Compression(STREAMING_LLM, 16, num_sinks=0)
    moved, unmoved = readings.read(asked, is_renumbered=True), readings.read(asked)
    torch.testing.assert_close(moved.logits, unmoved.logits, atol=1e-3, rtol=0)
    with_sinks = Compression(STREAMING_LLM, 16)
    moved, unmoved = readings.read(with_sinks, is_renumbered=True), readings.read(with_sinks)
    assert (moved.logits - unmoved.logits).abs().max() > 1e-2


def test_policies_are_compared_with_the_whole() -> None:
    rows = list(measure("tiny", 1, 40, 8, [16]))
    assert [row["policy"] for row in rows] == ["none", *CompressionPolicy, STREAMING_LLM, "window without sinks"]
    assert (rows[0]["kl"], rows[0]["same_top"]) == (0, 1)
    assert all(row["kl"] > 0 and row["kv_bytes"] < rows[0]["kv_bytes"] for row in rows[1:])
