"""Windowed layers with a separate pool and tiers: evicted K/V is restored with the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.startup.build_engine import build_engine
from tests.model.exact.checkpoints import CONFIGS, VOCAB_SIZE, write_checkpoint
from tests.model.exact.exact_cases import MODELS
from tests.offload.always_load import AlwaysLoad
from tests.patience import PATIENCE_S
from tests.startup.running import running, settle

pytestmark = pytest.mark.usefixtures("patient_guards")

HOST = "tiers.host_bytes=100000000"
LONG_TOKENS = 480
# The pool has the memory of 54 blocks of three layers. The two windowed layers take that of 17 parts (272 tokens), and
# all other memory is blocks of the third layer.
CAPACITY_TOKENS = 54 * 16
NUM_BLOCKS = 54 * 3 - 17 * 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers, two of which have a window of 24 tokens."""
    return write_checkpoint(CONFIGS["gemma2"], tmp_path_factory.mktemp("windowed_tiers"))


@contextlib.contextmanager
def served(checkpoint: Path, *settings: str, windowed_tokens: int = 272) -> Iterator[Engine]:
    """Run an engine whose windowed layers hold little more than a request needs."""
    # With the default policy, the order of evictions depends on measured times.
    pool = (f"cache.capacity_tokens={CAPACITY_TOKENS}", "cache.block_size=16", "cache.policy=lru")
    model = (f"model.path={checkpoint}", "model.device=cpu", "engine.max_step_tokens=64")
    fixed = (*model, f"cache.windowed_tokens={windowed_tokens}", *pool)
    with running(build_engine(Config.load(None, [*fixed, *settings]), load_or_compute=AlwaysLoad(16))) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[Engine]:
    """An engine with host memory for several tests."""
    with served(checkpoint, HOST) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """The shared engine, with nothing cached or stored."""
    shared.purge(tenant="acme").result(PATIENCE_S)
    return shared


def tokens(seed: int, count: int = LONG_TOKENS) -> bytes:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).astype("<u4").tobytes()


def ask(engine: Engine, prompt: bytes, **params: bool) -> PrefillResult:
    return engine.prefill(PrefillParams(prompt, Caller("acme"), return_logits=True, **params)).result(PATIENCE_S)


def ask_warm(engine: Engine, prompt: bytes) -> tuple[int, int]:
    """Compare a prompt's logits with those computed without the cache. Returns tokens reused from device and tiers."""
    warm = ask(engine, prompt)
    cold = ask(engine, prompt, read_cache=False, write_cache=False)
    assert cold.usage.cached_tokens == 0
    np.testing.assert_array_equal(warm.logits, cold.logits)
    return warm.usage.device_tokens, warm.usage.cached_tokens - warm.usage.device_tokens


def evict(engine: Engine, num_blocks: int = NUM_BLOCKS) -> None:
    """Evict blocks from the device, and wait until the tiers have stored them."""
    engine._call(lambda: engine._core.cache.evict(num_blocks)).result(PATIENCE_S)
    settle(engine)


@pytest.mark.parametrize(("model", "kv_dtype"), [("mistral", "auto"), ("gemma2", "int8"), ("gemma4_text", "int8")])
def test_an_evicted_prompt_is_loaded_with_its_bits(model: str, kv_dtype: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(MODELS[model], tmp_path)
    with served(checkpoint, HOST, f"cache.kv_dtype={kv_dtype}") as engine:
        assert engine._core._runner.storage.groups is not None
        ask(engine, tokens(1, 200))
        evict(engine)
        assert ask_warm(engine, tokens(1, 200)) == (0, 192)


def test_blocks_outside_every_window_are_loaded_without_their_windowed_part(engine: Engine) -> None:
    ask(engine, tokens(1))
    assert engine._core.cache.windows.pools[0].num_evicted > 0
    evict(engine)
    assert engine.offload is not None
    assert engine.offload.index.tiers["host"].partless
    assert ask_warm(engine, tokens(1) + tokens(2, 20)) == (0, LONG_TOKENS)


def test_blocks_left_on_the_device_are_combined_with_the_stored_end_of_the_prompt(engine: Engine) -> None:
    ask(engine, tokens(1))
    evict(engine, 17)  # the blocks at the end of the prompt, which have their parts
    (node,) = engine._core.cache.nodes()
    assert engine._core.cache.match(node.owner.namespace, tokens(1)).cached_tokens == 96, "few have their parts"
    assert ask_warm(engine, tokens(1) + tokens(2, 20)) == (LONG_TOKENS - 272, 272)


def test_a_full_device_evicts_other_prompts_for_a_loaded_one(engine: Engine) -> None:
    ask(engine, tokens(1))
    for seed in range(2, 7):
        ask(engine, tokens(seed, 23 * 16))  # in all 115 blocks, so 17 of the first prompt are evicted
    settle(engine)
    assert engine._core.cache.pool.num_blocks == NUM_BLOCKS
    assert engine._core.cache.pool.num_free == 0
    assert ask_warm(engine, tokens(1) + tokens(9, 20)) == (LONG_TOKENS - 272, 272)


def test_windowed_parts_are_loaded_for_blocks_on_the_device_without_them(engine: Engine) -> None:
    ask(engine, tokens(1))
    evict(engine)
    ask(engine, tokens(1))
    assert ask_warm(engine, tokens(1)[: 4 * 336] + tokens(2, 20)) == (336 - 48, 48)


def test_a_stored_block_gets_its_part_when_it_is_evicted_again(engine: Engine) -> None:
    branch = tokens(1)[: 4 * 80]
    ask(engine, tokens(1))
    evict(engine)
    assert ask_warm(engine, branch + tokens(2, 20)) == (0, 0), (
        "the parts inside the window are neither on the device nor stored"
    )
    evict(engine)
    assert ask_warm(engine, branch + tokens(3, 20)) == (0, 80)


def test_a_restart_finds_blocks_inside_windows_on_disk(checkpoint: Path, tmp_path: Path) -> None:
    disk = (f"tiers.disk_path={tmp_path}", "tiers.disk_bytes=100000000")
    with served(checkpoint, *disk) as engine:
        ask(engine, tokens(1))
    with served(checkpoint, *disk) as engine:
        settle(engine)
        assert ask_warm(engine, tokens(1) + tokens(2, 20)) == (0, LONG_TOKENS)
        assert ask_warm(engine, tokens(1)[: 4 * 160] + tokens(3, 20)) == (0, 0), (
            "these blocks were stored without their parts"
        )


def test_one_pool_finds_no_blocks_of_two_pools(checkpoint: Path, tmp_path: Path) -> None:
    disk = (f"tiers.disk_path={tmp_path}", "tiers.disk_bytes=100000000")
    with served(checkpoint, *disk) as engine:
        ask(engine, tokens(1, 200))
    with served(checkpoint, *disk, windowed_tokens=0) as engine:
        settle(engine)
        assert ask_warm(engine, tokens(1, 200)) == (0, 0)
