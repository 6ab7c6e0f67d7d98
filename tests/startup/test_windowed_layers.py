"""The pool of windowed layers: when there is one, its size, and a server that has one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixkv.api.caller import Caller
from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.api.sampling import Sampling
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.errors import ConfigError, Draining, OutOfBlocks
from radixkv.startup.build_engine import build_engine
from tests.model.exact.checkpoints import CONFIGS, VOCAB_SIZE, write_checkpoint
from tests.model.exact.exact_cases import MODELS


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, two of which have a window of 24 tokens."""
    return write_checkpoint(CONFIGS["gemma2"], tmp_path_factory.mktemp("gemma2"))


def config(model: Path, *settings: str) -> Config:
    return Config.load(
        None,
        [
            f"model.path={model}",
            "model.device=cpu",
            "cache.capacity_tokens=2048",
            "cache.block_size=16",
            "engine.max_step_tokens=64",
            *settings,
        ],
    )


def tokens(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).astype("<u4").tobytes()


def test_windowed_layers_get_what_their_window_needs(gemma2: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="radixkv"):
        engine = build_engine(config(gemma2))
    storage = engine._core._runner.storage
    assert (storage.num_parts, storage.num_dedicated_parts) == (128, 9)
    assert storage.num_blocks == 3 * 128 - 2 * 9 == 366  # of one layer, in the memory that 9 parts of two layers leave
    assert "2 of 3 layers have windows of at most 24 tokens: the pool holds at most 2048 tokens for them" in caplog.text
    assert ", and at most 5856 tokens for the other layers in " in caplog.text
    whole = build_engine(config(gemma2, "cache.windowed_tokens=0"))._core._runner.storage
    assert storage.num_bytes == whole.num_bytes


@pytest.mark.parametrize("windowed_tokens", [272, 1024, 2000])
def test_memory_saved_by_windowed_layers_holds_more_blocks_of_other_layers(gemma2: Path, windowed_tokens: int) -> None:
    whole = build_engine(config(gemma2, "cache.windowed_tokens=0"))._core._runner.storage
    divided = build_engine(config(gemma2, f"cache.windowed_tokens={windowed_tokens}"))._core._runner.storage
    assert divided.num_blocks > whole.num_blocks
    assert divided.num_bytes <= whole.num_bytes < divided.num_bytes + divided.block_bytes


def test_a_model_of_windowed_layers_alone_has_a_part_for_every_block_of_one_pool(tmp_path: Path) -> None:
    model = write_checkpoint(MODELS["mistral"], tmp_path)
    storage = build_engine(config(model))._core._runner.storage
    assert (storage.num_blocks, storage.num_parts) == (8 * 128, 128)
    assert storage.num_bytes == 128 * storage.part_bytes


def test_a_long_window_shares_memory_unless_one_request_needs_all_of_it(tmp_path: Path) -> None:
    fields = {**MODELS["gemma2"].to_dict(), "sliding_window": 2048, "max_position_embeddings": 8192}
    model = write_checkpoint(type(MODELS["gemma2"])(**fields), tmp_path)
    storage = build_engine(config(model, "cache.capacity_tokens=8192"))._core._runner.storage
    # Parts of a window and of a step of 64 tokens. A window may begin inside a block, which needs one part more, and a
    # request also needs the part that is written next and a part that is copied.
    assert (storage.num_dedicated_parts, storage.num_parts) == (2048 // 16 + 64 // 16 + 3, 512)
    storage = build_engine(config(model, "cache.capacity_tokens=2048"))._core._runner.storage
    assert (storage.groups, storage.num_blocks) == (None, 128)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["transfer.serve=true"], "because of transfers of K/V, which send whole blocks"),
        (["cache.capacity_tokens=128"], "a pool of their own would need 9 blocks, which saves no memory"),
    ],
)
def test_windowed_layers_keep_everything_if_a_feature_needs_it(
    gemma2: Path, settings: list[str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="radixkv"):
        engine = build_engine(config(gemma2, *settings))
    assert engine._core._runner.storage.groups is None
    assert engine._core.cache.windows.pools == ()
    assert reason in caplog.text
    engine._core.close(Draining("the test has ended"))


def test_windowed_tokens_of_0_make_windowed_layers_keep_everything(gemma2: Path) -> None:
    assert build_engine(config(gemma2, "cache.windowed_tokens=0"))._core._runner.storage.groups is None


def test_windowed_tokens_are_rounded_down_to_blocks(gemma2: Path) -> None:
    assert build_engine(config(gemma2, "cache.windowed_tokens=500"))._core._runner.storage.num_parts == 31


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["cache.windowed_tokens=143"], "expected at least 144, for a window of 24 tokens and steps of 64, got 143"),
        (
            ["cache.windowed_tokens=500", "transfer.serve=true"],
            "expected none, or 0, for transfers of K/V, which send whole blocks, got 500",
        ),
    ],
)
def test_invalid_windowed_tokens_are_rejected(gemma2: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^cache\.windowed_tokens: {message}$"):
        build_engine(config(gemma2, *settings))


def test_windowed_tokens_for_a_model_without_windows_are_rejected(tmp_path: Path) -> None:
    model = write_checkpoint(CONFIGS["llama"], tmp_path)
    message = "a model without a sliding window that is shorter than its longest sequence, got 500"
    with pytest.raises(ConfigError, match=message):
        build_engine(config(model, "cache.windowed_tokens=500"))


def prefill(engine: Engine, prompt: bytes, **options: Any) -> PrefillResult:
    return engine.prefill(PrefillParams(prompt, return_logits=True, **options)).result(60)


@pytest.fixture
def engines(gemma2: Path) -> Iterator[tuple[Engine, Engine]]:
    """An engine whose windowed layers hold little more than a request needs, and one where they hold everything."""
    divided, whole = (build_engine(config(gemma2, f"cache.windowed_tokens={number}")) for number in (272, 0))
    for engine in (divided, whole):
        engine.start()
    yield divided, whole
    for engine in (divided, whole):
        engine.check().result(60)
        engine.stop()


def test_many_long_requests_at_once_are_answered_with_the_same_bits(engines: tuple[Engine, Engine]) -> None:
    shared = tokens(0, 90)
    prompts = [shared + tokens(seed, 20 + 30 * seed) for seed in range(1, 7)]
    answers = []
    for engine in engines:
        futures = [engine.prefill(PrefillParams(prompt, return_logits=True)) for prompt in prompts]
        sampling = Sampling(40, temperature=1.0, seed=1, ignore_eos=True)
        futures += [engine.generate(PrefillParams(prompt), sampling, lambda _: None) for prompt in prompts]
        answers.append([future.result(120) for future in futures])
    for divided, whole in zip(*answers, strict=True):
        if isinstance(divided, PrefillResult):
            assert np.array_equal(divided.logits, whole.logits)
        else:
            assert divided.token_ids == whole.token_ids


def test_a_turn_hits_although_parts_before_its_window_were_released(engines: tuple[Engine, Engine]) -> None:
    divided, whole = engines
    prompt = tokens(1, 480)
    for engine in engines:
        assert prefill(engine, prompt).usage.cached_tokens == 0
    assert divided._core.cache.windows.pools[0].num_evicted > 0
    next_turn = prompt + tokens(2, 20)
    divided_answer, whole_answer = prefill(divided, next_turn), prefill(whole, next_turn)
    assert divided_answer.usage.cached_tokens == whole_answer.usage.cached_tokens == 480
    assert np.array_equal(divided_answer.logits, whole_answer.logits)
    branch = prompt[: 4 * 250] + tokens(3, 30)
    divided_answer, whole_answer = prefill(divided, branch), prefill(whole, branch)
    assert (divided_answer.usage.cached_tokens, divided_answer.miss_reason) == (224, MissReason.NO_WINDOW)
    assert (whole_answer.usage.cached_tokens, whole_answer.miss_reason) == (250, MissReason.DIVERGED)
    assert np.array_equal(divided_answer.logits, whole_answer.logits)


def test_a_held_lease_and_a_public_prefix_keep_their_parts(engines: tuple[Engine, Engine]) -> None:
    divided, _ = engines
    prompt = tokens(1, 100)
    held = prefill(divided, prompt, hold_lease=True).held_lease
    assert held is not None
    for seed in range(5, 9):
        prefill(divided, tokens(seed, 300))
    assert prefill(divided, prompt).usage.cached_tokens == 99
    divided.release(held.lease_id).result(60)
    with pytest.raises(OutOfBlocks, match="parts of windowed layers: expected at most 4 that outlive their requests"):
        divided.public.register("system", tokens(4, 200)).result(60)
    divided.public.register("short", tokens(4, 40)).result(60)
    for seed in range(5, 9):
        prefill(divided, tokens(seed, 300), caller=Caller("acme"))
    other_tenant = prefill(divided, tokens(4, 30) + tokens(9, 20), caller=Caller("acme"))
    assert other_tenant.usage.public_tokens == 30


def test_a_server_that_failed_tries_steps_again(engines: tuple[Engine, Engine]) -> None:
    core = engines[0]._core
    core.num_failed_steps = 3
    engines[0]._call(core.try_step).result(60)
    assert core.num_failed_steps == 0
