"""A model with recurrent states, from its directory to its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from radixkv.api.caller import Caller
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens
from radixkv.api.sampling import Sampling
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.errors import ConfigError, SwitchedOff, UnsupportedModel
from radixkv.startup.build_engine import build_engine
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.model.exact.exact_cases import MODELS

PROMPT = np.random.default_rng(0).integers(2, 300, 200).astype("<u4")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(MODELS["lfm2"], tmp_path_factory.mktemp("lfm2"))


def config(directory: Path, *settings: str) -> Config:
    fixed = ("model.device=cpu", "cache.capacity_tokens=4096", "cache.block_size=16", "cache.state_every_tokens=64")
    return Config.load(None, [f"model.path={directory}", *fixed, *settings])


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    engine = build_engine(config(directory))
    engine.start()
    yield engine
    engine.check().result(60)
    engine.stop()


def ignore_tokens(_: GeneratedTokens) -> None:
    pass


def params(tokens: np.ndarray, tenant: str = "acme", **options: object) -> PrefillParams:
    return PrefillParams(tokens.tobytes(), Caller(tenant), **options)  # type: ignore[arg-type]


def test_a_hit_changes_no_bit_and_the_response_reports_where_it_started(engine: Engine) -> None:
    cold = engine.prefill(params(PROMPT, "cold", return_logits=True)).result(60)
    again = engine.prefill(params(PROMPT, "cold", return_logits=True)).result(60)
    branch = np.concatenate((PROMPT[:150], PROMPT[:9]))
    branches = [engine.prefill(params(branch, "cold")).result(60) for _ in range(2)]
    # A snapshot is taken every 64 tokens, and in the last block before the point at which the first branch diverged.
    assert (again.usage.cached_tokens, again.miss_reason) == (192, MissReason.NONE)
    assert cold.logits is not None
    assert again.logits is not None
    assert np.array_equal(cold.logits, again.logits)
    assert [each.usage.cached_tokens for each in branches] == [128, 144]
    assert branches[0].miss_reason is MissReason.NO_STATE
    states = engine.load().result(60).states
    assert states is not None
    assert (states.snapshots, states.max_snapshots) == (4, 204)
    assert states.recomputed_tokens == 144 - 128, "by the first branch, whose K/V was cached but not its state"


def test_generations_and_their_next_turns_continue_from_states(engine: Engine) -> None:
    alone = engine.generate(params(PROMPT, "a"), Sampling(30, ignore_eos=True), ignore_tokens).result(60)
    futures = [engine.generate(params(PROMPT, "b"), Sampling(30, ignore_eos=True), ignore_tokens) for _ in range(3)]
    for future in futures:
        assert future.result(60).token_ids == alone.token_ids
    turn = np.concatenate((PROMPT, np.array(alone.token_ids, dtype="<u4"), PROMPT[:5]))
    warm = engine.prefill(params(turn, "a", return_logits=True)).result(60)
    cold = engine.prefill(params(turn, "c", return_logits=True)).result(60)
    assert warm.usage.cached_tokens == 224  # the full blocks of the 230 tokens of the turn before
    assert warm.logits is not None
    assert cold.logits is not None
    assert np.array_equal(warm.logits, cold.logits)


def test_options_that_states_do_not_support_are_rejected_by_name(engine: Engine) -> None:
    with pytest.raises(SwitchedOff, match=r"compression: expected .*, got a model with recurrent layers"):
        engine.generate(
            params(PROMPT), Sampling(10, compression=Compression(CompressionPolicy.STREAMING_LLM, 64)), ignore_tokens
        )
    with pytest.raises(SwitchedOff, match="public prefixes: expected a model without recurrent states"):
        engine.public.register("system", PROMPT.tobytes()).result(60)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("tiers.host_bytes", ["tiers.host_bytes=1000000"]),
        ("tiers.redis_url", ["tiers.redis_url=redis://127.0.0.1:1/0", "tiers.trusted=true"]),
        ("transfer.serve", ["transfer.serve=true"]),
        ("kv_sources", ["kv_sources.first.address=127.0.0.1:1", "kv_sources.first.trusted=true"]),
    ],
)
def test_kv_transfer_is_rejected_at_startup(key: str, settings: list[str], directory: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"^{key}: expected no value for Lfm2ForCausalLM, which keeps"):
        build_engine(config(directory, *settings))


@pytest.mark.parametrize(("state_bytes", "num_snapshots"), [(None, 204), (0, 0), (3000, 2), (10**9, 256)])
def test_the_budget_covers_snapshots_and_not_running_requests(
    state_bytes: int | None, num_snapshots: int, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state takes 1,024 bytes: two layers of two inputs of 64 numbers. K and V of 4,096 tokens take 2 MiB.

    There are at most as many snapshots as blocks, 256.
    """
    settings = [] if state_bytes is None else [f"cache.state_bytes={state_bytes}"]
    engine = build_engine(config(directory, "engine.max_running_requests=5", *settings))
    states = engine._core.cache.state_slots
    assert states is not None
    assert (states.num_snapshots, states.num_slots) == (num_snapshots, num_snapshots + 5)
    assert engine._core._runner.states is not None
    assert engine._core._runner.states.num_slots == states.num_slots
    warnings = [message for message in caplog.messages if "cache.state_bytes" in message]
    assert bool(warnings) == (num_snapshots < 64)
    for warning in warnings:
        assert f"room for {num_snapshots} snapshots" in warning
        assert warning.endswith("64 snapshots need 65536 bytes")


@pytest.mark.parametrize("state_bytes", [1, 1023])
def test_memory_for_less_than_one_snapshot_is_refused(state_bytes: int, directory: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cache\.state_bytes: expected at least 1024, .*got {state_bytes}$"):
        build_engine(config(directory, f"cache.state_bytes={state_bytes}"))


def test_a_model_without_states_has_no_slots(tmp_path: Path) -> None:
    engine = build_engine(config(write_checkpoint(CONFIGS["llama"], tmp_path)))
    assert engine._core.cache.state_slots is None
    assert engine._core._runner.states is None
