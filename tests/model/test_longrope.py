"""Models with longrope, with short factors up to the original length, or long factors at all positions."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PretrainedConfig

from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.startup.model_check import check_model
from radixkv.storage.device_pool import KVStorage
from tests.model.exact.checkpoints import SHAPE, VOCAB_SIZE, load_eager, write_checkpoint

BLOCK_SIZE = 16
ORIGINAL = 48
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + index / 8 for index in range(8)],
    "long_factor": [2.0 + index for index in range(8)],
    "original_max_position_embeddings": ORIGINAL,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=dict(ROPE)),
    "phi3": Phi3Config(**SHAPE, pad_token_id=0, original_max_position_embeddings=ORIGINAL, rope_parameters=dict(ROPE)),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(CONFIGS[request.param], tmp_path_factory.mktemp(request.param), max_shard_size="10MB")


def load(directory: Path, longrope: str) -> Model:
    return load_model(ModelConfig(path=str(directory), device="cpu", longrope=longrope))


def tokens_of(length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCAB_SIZE, length).astype("<u4")


def expected(directory: Path, tokens: np.ndarray) -> torch.Tensor:
    """Logits of transformers' eager forward pass after each token, `[num_tokens, vocab_size]`."""
    with torch.inference_mode():
        return load_eager(directory)(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]


def served(model: Model, tokens: np.ndarray, ends: list[int]) -> list[torch.Tensor]:
    """Logits before each of these ends; each part is computed over the K/V of the parts before it."""
    storage = KVStorage(16, BLOCK_SIZE, model.kv_shape, model.device)
    runner = Runner(model, storage, TorchKernels())
    logits = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        block_ids = np.arange(-(-end // BLOCK_SIZE), dtype=np.int32)
        logits.append(runner.run([Chunk(tokens.tobytes(), start, end, block_ids, None, wants_logits=True)]).logits[0])
    return logits


def assert_agree(got: list[torch.Tensor], rows: torch.Tensor) -> None:
    assert rows.std() > 1e-2
    assert max(float((each - row).abs().max()) for each, row in zip(got, rows, strict=True)) <= 1e-4


def test_short_factors_serve_the_first_length(directory: Path) -> None:
    model = load(directory, "short")
    assert (model.max_tokens, model.limit.stated_tokens) == (ORIGINAL, 512)
    check_model(model, TorchKernels(), BLOCK_SIZE)
    tokens, ends = tokens_of(ORIGINAL), [20, 21, ORIGINAL]
    assert_agree(served(model, tokens, ends), expected(directory, tokens)[[end - 1 for end in ends]])


def test_long_factors_serve_all_lengths_as_transformers_computes_long_ones(directory: Path) -> None:
    """With longer sequences transformers uses the long factors for all tokens, also for those at the beginning."""
    model = load(directory, "long")
    assert (model.max_tokens, model.limit.reason) == (512, "")
    check_model(model, TorchKernels(), BLOCK_SIZE)
    tokens, ends = tokens_of(3 * ORIGINAL), [5, 20, 21, ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL]
    rows = expected(directory, tokens)
    assert_agree(served(model, tokens, ends), rows[[end - 1 for end in ends]])
    short = expected(directory, tokens[:ORIGINAL])
    assert (short[-1] - rows[ORIGINAL - 1]).abs().max() > 1e-2, "the factors make a difference"


def test_blocks_of_one_choice_are_not_those_of_the_other(directory: Path) -> None:
    assert load(directory, "short").fingerprint != load(directory, "long").fingerprint


def test_the_start_reports_a_limit_below_that_of_the_configuration(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        load(directory, "short")
    (message,) = [each.getMessage() for each in caplog.records if "sequences of at most" in each.getMessage()]
    assert "at most 48 tokens are served, although config.json states 512" in message
    assert 'model.longrope = "long"' in message
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load(directory, "long")
    assert not [each for each in caplog.records if "sequences of at most" in each.getMessage()]


def test_a_model_without_longrope_has_no_long_factors(tmp_path: Path) -> None:
    write_checkpoint(LlamaConfig(**SHAPE), tmp_path, max_shard_size="10MB")
    for path in (str(tmp_path), "tiny"):
        with pytest.raises(ConfigError, match=r'model\.longrope: expected "short" for a model without longrope'):
            load_model(ModelConfig(path=path, device="cpu", longrope="long"))
