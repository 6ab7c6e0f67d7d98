"""An engine whose layers store K/V of different shapes: pool sizes, equal bits, tiers, and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from radixkv.api.caller import Caller
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.api.sampling import Sampling
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.errors import SwitchedOff, UnsupportedModel
from radixkv.startup.build_engine import build_engine
from tests.model.exact.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.model.exact.exact_cases import MODELS
from tests.offload.always_load import AlwaysLoad
from tests.patience import PATIENCE_S
from tests.startup.running import running, settle

SLIDING_TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # two layers, K and V, two heads of 16 numbers in float32
FULL_TOKEN_BYTES = 2 * 1 * 32 * 4  # K and V, one head of 32 numbers in float32


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with a window of 24 tokens and two heads of 16, and a layer without, with one head of 32."""
    return write_checkpoint(MODELS["gemma4_text"], tmp_path_factory.mktemp("gemma4"))


@contextlib.contextmanager
def served(model: Path, *settings: str) -> Iterator[Engine]:
    """Run an engine whose pool has the memory of 128 blocks of all layers."""
    fixed = (f"model.path={model}", "model.device=cpu", "cache.capacity_tokens=2048", "cache.block_size=16")
    config = Config.load(None, [*fixed, "engine.max_step_tokens=64", *settings])
    with running(build_engine(config, load_or_compute=AlwaysLoad(16))) as engine:
        yield engine


def ask(engine: Engine, prompt: bytes, **params: bool) -> PrefillResult:
    return engine.prefill(PrefillParams(prompt, Caller("acme"), return_logits=True, **params)).result(PATIENCE_S)


def tokens(count: int) -> bytes:
    return np.random.default_rng(1).integers(3, VOCAB_SIZE, count).astype("<u4").tobytes()


@pytest.mark.parametrize(
    ("settings", "num_block_and_part_pools"),
    [((), (1, 1)), (("cache.windowed_tokens=0",), (2, 0))],
    ids=["divided", "whole"],
)
def test_a_hit_inside_a_block_has_the_same_bits(
    gemma4: Path, settings: tuple[str, ...], num_block_and_part_pools: object
) -> None:
    with served(gemma4, *settings) as engine:
        storage = engine._core._runner.storage
        assert (len(storage.pools), len(storage.part_pools)) == num_block_and_part_pools
        prompt = tokens(230)
        cold = ask(engine, prompt, read_cache=False)
        ask(engine, prompt[: 4 * 170] + tokens(9))
        warm = ask(engine, prompt)
        assert warm.usage.cached_tokens > 200
        assert np.array_equal(warm.logits, cold.logits)


def test_windowed_layers_leave_their_own_bytes_to_the_others(gemma4: Path) -> None:
    with served(gemma4) as engine:
        storage = engine._core._runner.storage
    assert (storage.part_bytes, storage.block_bytes) == (16 * SLIDING_TOKEN_BYTES, 16 * FULL_TOKEN_BYTES)
    pool_bytes = 128 * 16 * (SLIDING_TOKEN_BYTES + FULL_TOKEN_BYTES)
    assert pool_bytes - storage.block_bytes < storage.num_bytes <= pool_bytes
    assert storage.num_dedicated_parts < storage.num_parts == 128 < storage.num_blocks


@pytest.mark.parametrize("settings", [(), ("cache.windowed_tokens=0",)], ids=["divided", "whole"])
def test_evicted_blocks_are_loaded_with_the_same_bits(gemma4: Path, settings: tuple[str, ...]) -> None:
    with served(gemma4, "tiers.host_bytes=100000000", *settings) as engine:
        prompt = tokens(230)
        cold = ask(engine, prompt)
        num_blocks = engine._core._runner.storage.num_blocks
        engine._call(lambda: engine._core.cache.evict(num_blocks)).result(PATIENCE_S)
        settle(engine)
        warm = ask(engine, prompt)
        assert warm.usage.host_tokens > 0
        assert np.array_equal(warm.logits, cold.logits)


def test_transfers_are_refused_by_name(gemma4: Path) -> None:
    message = "layers with K/V of different shapes: expected neither transfer.serve nor kv_sources"
    with pytest.raises(UnsupportedModel, match=message), served(gemma4, "transfer.serve=true"):
        raise AssertionError("the engine was built")


def test_generations_with_compressed_kv_are_refused_with_the_reason(gemma4: Path) -> None:
    with served(gemma4) as engine:
        params = PrefillParams(tokens(40), Caller("acme"))
        sampling = Sampling(4, compression=Compression(CompressionPolicy.H2O, 32))
        with pytest.raises(SwitchedOff, match="a model whose layers store K/V of different shapes"):
            engine.generate(params, sampling, lambda _: None).result(PATIENCE_S)
