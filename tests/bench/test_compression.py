"""Texts are read with compressed K/V, and the predictions are compared with those of the full K/V."""

from __future__ import annotations

import pytest
import torch

from bench.compression import BLOCK_SIZE, TextReader, measure
from bench.parts.quality import PoolText, held_out_texts, load
from radixkv.api.compression import Compression, CompressionPolicy

pytestmark = pytest.mark.long

STREAMING_LLM, H2O, SNAPKV = CompressionPolicy
PROMPT_TOKENS, NEW_TOKENS = 40, 24


@pytest.fixture(scope="module")
def texts() -> list[torch.Tensor]:
    return held_out_texts("tiny", 2, PROMPT_TOKENS + NEW_TOKENS)


@pytest.fixture(scope="module")
def reader(texts: list[torch.Tensor]) -> TextReader:
    return TextReader(load("tiny"), texts, PROMPT_TOKENS)


def test_without_compression_predictions_are_those_of_the_model(reader: TextReader, texts: list[torch.Tensor]) -> None:
    read = reader.read(None)
    for logits, ids in zip(read.logits, texts, strict=True):
        assert torch.equal(
            logits, PoolText(load("tiny"), "auto", PROMPT_TOKENS + NEW_TOKENS).append(ids)[PROMPT_TOKENS:]
        )
    assert read.blocks == (PROMPT_TOKENS + NEW_TOKENS) / BLOCK_SIZE


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("policy", CompressionPolicy)
def test_a_smaller_budget_takes_fewer_blocks_and_changes_predictions(
    reader: TextReader, policy: CompressionPolicy
) -> None:
    whole = reader.read(None)
    large, small = (reader.read(Compression(policy, budget)) for budget in (PROMPT_TOKENS + NEW_TOKENS, 16))
    assert torch.equal(large.logits, whole.logits)
    assert small.blocks < whole.blocks
    assert not torch.equal(small.logits, whole.logits)


def test_renumbered_positions_change_nothing_if_all_entries_move(reader: TextReader) -> None:
    """Scores depend only on distances, and without sinks all distances stay the same."""
    without_sinks = Compression(STREAMING_LLM, 16, num_sinks=0)
    moved, unmoved = reader.read(without_sinks, is_renumbered=True), reader.read(without_sinks)
    torch.testing.assert_close(moved.logits, unmoved.logits, atol=1e-3, rtol=0)
    with_sinks = Compression(STREAMING_LLM, 16)
    moved, unmoved = reader.read(with_sinks, is_renumbered=True), reader.read(with_sinks)
    assert (moved.logits - unmoved.logits).abs().max() > 1e-2


def test_policies_are_compared_with_the_full_kv() -> None:
    rows = list(measure("tiny", 1, 40, 8, [16]))
    assert [row["policy"] for row in rows] == ["none", *CompressionPolicy, STREAMING_LLM, "window without sinks"]
    assert (rows[0]["kl"], rows[0]["same_top"]) == (0, 1)
    assert all(row["kl"] > 0 and row["kv_bytes"] < rows[0]["kv_bytes"] for row in rows[1:])
