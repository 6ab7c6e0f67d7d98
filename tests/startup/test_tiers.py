"""Engines with tiers: the same bits from each tier, also after a restart, and service without a tier."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
import torch
from redis import Redis
from xxhash import xxh3_128_digest

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.api.retention import Retention
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.errors import ConfigError
from radixkv.kernels.native import copies
from radixkv.kernels.native.copies import NativeCopies
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.offload.tiers import open_store
from radixkv.offload.tiers.block_object import object_bytes
from radixkv.offload.tiers.block_store import StoreBackend, StoreSize
from radixkv.offload.tiers.host import HostStore, map_memory
from radixkv.offload.tiers.open_store import StoreOptions
from radixkv.offload.tiers.slot_files import SlotSizes
from radixkv.startup import tiers
from radixkv.startup.build_engine import build_engine
from radixkv.telemetry.gauges import EngineGauges
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.model.exact.exact_cases import MODELS
from tests.offload.always_load import AlwaysLoad
from tests.offload.tiers.backends import native_or_skip
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, RedisServer, redis_server
from tests.patience import PATIENCE_S, wait_until
from tests.startup.running import running, settle

pytestmark = pytest.mark.usefixtures("patient_guards")

TRUSTED = "tiers.trusted=true"
BLOCK_SIZE, POOL_TOKENS = 16, 256
PROMPT_TOKENS = 83  # five full blocks, of a pool of 16, and three tokens
FULL_BLOCK_TOKENS = 80  # the tokens of a prompt that tiers can store


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(CONFIGS["llama"], tmp_path_factory.mktemp("tiers") / "llama")


def config(checkpoint: Path, *settings: str) -> Config:
    pool = ("model.device=cpu", f"cache.capacity_tokens={POOL_TOKENS}", f"cache.block_size={BLOCK_SIZE}")
    return Config.load(None, [f"model.path={checkpoint}", *pool, *settings])


@contextlib.contextmanager
def engine(checkpoint: Path, *settings: str, load_or_compute: LoadOrCompute | None = None) -> Iterator[Engine]:
    """Run an engine. It loads all stored blocks of a prompt, unless `load_or_compute` is given."""
    with running(
        build_engine(config(checkpoint, *settings), load_or_compute=load_or_compute or AlwaysLoad(BLOCK_SIZE))
    ) as engine:
        yield engine


def prompt(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 100, PROMPT_TOKENS).astype("<u4").tobytes()


def ask(engine: Engine, seed: int, **params: bool) -> PrefillResult:
    return engine.prefill(PrefillParams(prompt(seed), Caller("acme"), return_logits=True, **params)).result(PATIENCE_S)


def cold_logits(engine: Engine, seed: int) -> object:
    """Return the logits of a prompt that is computed without the cache."""
    return ask(engine, seed, read_cache=False, write_cache=False).logits


@pytest.fixture(scope="module")
def latent_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(MODELS["deepseek_v3"], tmp_path_factory.mktemp("tiers") / "latent")


# Each of the three layers stores a latent of 48 numbers per token, in int8 with a scale of 4 bytes.
@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("auto", 3 * 48 * 4), ("int8", 3 * (48 + 4))])
def test_stored_latents_have_the_bits_of_those_computed_alone(
    latent_checkpoint: Path, kv_dtype: str, token_bytes: int, tmp_path: Path
) -> None:
    tiers = ("tiers.host_bytes=10000000", f"tiers.disk_path={tmp_path}", "tiers.disk_bytes=10000000")
    with engine(latent_checkpoint, *tiers, f"cache.kv_dtype={kv_dtype}") as served:
        before = [ask(served, seed).logits for seed in range(12)]
        settle(served)
        assert served.offload is not None
        size = served.offload.tiers["host"].size()
        padding_bytes = size.used_bytes / size.num_objects - object_bytes(BLOCK_SIZE, BLOCK_SIZE * token_bytes)
        assert 0 <= padding_bytes < 64, "objects are aligned to the processor's cache lines of 64 bytes"
        loaded = [ask(served, seed) for seed in range(6)]
        assert [each.usage.host_tokens for each in loaded] == [FULL_BLOCK_TOKENS] * 6
        for seed, result in enumerate(loaded):
            np.testing.assert_array_equal(result.logits, before[seed])
            np.testing.assert_array_equal(result.logits, cold_logits(served, seed))
    with engine(latent_checkpoint, *tiers[1:], f"cache.kv_dtype={kv_dtype}") as served:
        settle(served)
        restarted = ask(served, 0)
        assert restarted.usage.disk_tokens == FULL_BLOCK_TOKENS
        np.testing.assert_array_equal(restarted.logits, before[0])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_loaded_prompt_has_the_bits_of_one_computed_alone(checkpoint: Path, kv_dtype: str) -> None:
    with engine(checkpoint, "tiers.host_bytes=10000000", f"cache.kv_dtype={kv_dtype}") as served:
        for seed in range(12):
            ask(served, seed)
        settle(served)
        results = [ask(served, seed) for seed in range(6)]
        assert [each.usage.host_tokens for each in results] == [FULL_BLOCK_TOKENS] * 6
        for seed, result in enumerate(results):
            np.testing.assert_array_equal(result.logits, cold_logits(served, seed))


class CountingCopies:
    """Copies in C++. Counts the calls of each function that copied, rather than declined to."""

    def __init__(self, native: NativeCopies) -> None:
        self.num_done: Counter[str] = Counter()
        self._native = native

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            result = getattr(self._native, name)(*arguments)
            self.num_done[name] += bool(result)
            return result

        return call


def test_stores_and_the_pool_are_given_copies_in_cpp(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = CountingCopies(native_or_skip())
    monkeypatch.setattr(copies, "MIN_FILLED_BYTES", 0)
    monkeypatch.setattr(tiers, "native_copies", lambda: native)
    disk = (f"tiers.disk_path={tmp_path}", "tiers.disk_bytes=10000000")
    with engine(checkpoint, "tiers.host_bytes=10000000", *disk) as served:
        settle(served)  # so that the disk is scanned
        for seed in range(12):
            ask(served, seed)
            settle(served)
    with engine(checkpoint, *disk) as served:  # loads a prompt from the disk
        settle(served)
        ask(served, 0)
        settle(served)
    assert set(native.num_done) == {"copy_checked", "read_checked", "write_checked", "fill"}
    assert all(native.num_done.values())


def test_an_engine_uses_the_choice_between_loading_and_computing_that_is_passed_to_it(checkpoint: Path) -> None:
    load_or_compute = LoadOrCompute(BLOCK_SIZE)
    # As if a load took 1e6 seconds per block.
    for num_blocks in (1, 5):
        load_or_compute.note_start("host", num_blocks)
        load_or_compute.note_end("host", num_blocks, 1e6 * num_blocks)
    with engine(checkpoint, "tiers.host_bytes=10000000", load_or_compute=load_or_compute) as served:
        for seed in range(12):
            ask(served, seed)
        settle(served)
        usage = ask(served, 0).usage
        assert (usage.host_tokens, usage.computed_tokens) == (0, PROMPT_TOKENS), (
            "a load seems to take longer than the prefill"
        )
        assert served.offload is not None
        assert served.offload.stats()[0].computed_blocks == 5


def test_a_floor_and_a_retention_hold_in_stores(checkpoint: Path) -> None:
    settings = ("tenants.acme.floor_tokens=96", "tiers.host_bytes=200000")
    with engine(checkpoint, *settings) as served:
        assert served.offload is not None
        num_blocks = served.offload.index.tiers["host"].num_blocks
        # The floor is 6 of the 16 blocks of the device, and the same share of host memory, which holds a prompt.
        assert 6 * num_blocks // 16 >= 5
        for seed in (0, 100):  # ten blocks, which is more than the floor
            ask(served, seed)
        for seed in range(1, 4 + num_blocks // 3):
            served.prefill(PrefillParams(prompt(seed), Caller("other"))).result(PATIENCE_S)
            if seed == 3:
                settle(served)
                grant = served.retain(prompt(1), Retention(90), Caller("other")).result(PATIENCE_S).grant
                assert grant.granted_tokens > 0
        settle(served)
        assert ask(served, 0).usage.host_tokens == FULL_BLOCK_TOKENS, "the floor of acme protects the prompt"
        retained = served.prefill(PrefillParams(prompt(1), Caller("other"))).result(PATIENCE_S)
        assert retained.usage.cached_tokens == grant.granted_tokens // BLOCK_SIZE * BLOCK_SIZE
        assert served.segments.stored("host", 0, "acme", 10).result(PATIENCE_S).namespaces[0].num_blocks >= 5


def test_a_restart_finds_cached_blocks(checkpoint: Path, tmp_path: Path) -> None:
    """The second engine finds blocks that the first one evicted, and blocks that it had on the device at its end."""
    disk = f"tiers.disk_path={tmp_path}"
    with engine(checkpoint, disk, "tiers.disk_bytes=10000000") as served:
        before = [ask(served, seed).logits for seed in range(6)]
        assert served.offload is not None
    with engine(checkpoint, disk, "tiers.disk_bytes=10000000") as served:
        settle(served)  # so that the disk is scanned
        for seed, logits in enumerate(before):
            result = ask(served, seed)
            assert result.usage.disk_tokens == FULL_BLOCK_TOKENS
            np.testing.assert_array_equal(result.logits, logits)
        purged = served.purge(tenant="acme").result(PATIENCE_S)
        assert purged.stored_blocks == {"disk": 30}
    with engine(checkpoint, disk, "tiers.disk_bytes=10000000") as served:
        settle(served)
        assert ask(served, 0).usage.cached_tokens == 0


def test_a_disk_smaller_than_the_device_gets_the_most_recently_used_blocks(checkpoint: Path, tmp_path: Path) -> None:
    with engine(checkpoint, "tiers.host_bytes=1000000") as served:
        assert served.offload is not None
        size = served.offload.tiers["host"].size()
        assert size.capacity_bytes is not None
        assert size.max_objects is not None
        block_bytes = size.capacity_bytes // size.max_objects
    disk = (f"tiers.disk_path={tmp_path}", f"tiers.disk_bytes={7 * (block_bytes + 4096)}")
    with engine(checkpoint, *disk) as served:
        for seed in (1, 2):
            ask(served, seed)
    with engine(checkpoint, *disk) as served:
        settle(served)
        assert ask(served, 2).usage.disk_tokens == FULL_BLOCK_TOKENS


def test_after_a_restart_the_disk_evicts_in_lru_order(checkpoint: Path, tmp_path: Path) -> None:
    disk = f"tiers.disk_path={tmp_path}"
    with engine(checkpoint, disk, "tiers.disk_bytes=10000000") as served:
        for seed in (1, 2, 3):
            ask(served, seed)
        ask(served, 1)
    with engine(checkpoint, disk, "tiers.disk_bytes=10000000") as served:
        settle(served)
        assert served.offload is not None
        tier_index, keys = served.offload.index.tiers["disk"], served.offload.index.key_blocks
        namespace = tier_index.owned[next(iter(tier_index))]
        lru_order = []
        for seed in (2, 3, 1):  # the first prompt was used again
            block_keys = [block.key for block in keys(namespace, prompt(seed))]
            lru_order += reversed(block_keys)  # the end of a prompt is evicted before its beginning
        assert list(tier_index) == lru_order


def test_retention_survives_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    """The disk, of 25 blocks, evicts other blocks for those of later prompts."""
    token_bytes = 3 * 2 * 2 * 16 * 4  # three layers, K and V of two heads of 16 numbers in float32
    block_bytes = object_bytes(BLOCK_SIZE, BLOCK_SIZE * token_bytes) + 4096
    disk = (f"tiers.disk_path={tmp_path}", f"tiers.disk_bytes={25 * block_bytes}")
    with engine(checkpoint, *disk) as served:
        for seed in (1, 2):
            ask(served, seed)
        grant = served.retain(prompt(1), Retention(90, ttl_s=3600.0), Caller("acme")).result(PATIENCE_S).grant
        assert grant.granted_tokens > 0
    with engine(checkpoint, *disk) as served:
        settle(served)
        for seed in range(10, 20):
            ask(served, seed)
        settle(served)
        assert ask(served, 2).usage.cached_tokens == 0
        assert ask(served, 1).usage.disk_tokens == grant.granted_tokens // BLOCK_SIZE * BLOCK_SIZE


def wait_for_scan(engine: Engine) -> None:
    """Wait until the disk is scanned; unlike `settle`, without a call that the engine's thread executes."""
    assert engine.offload is not None
    for _ in engine.offload.wait_for_scan():
        pass


def test_a_restart_reports_stored_blocks_immediately(checkpoint: Path, tmp_path: Path) -> None:
    disk = (f"tiers.disk_path={tmp_path}", "tiers.disk_bytes=10000000")
    with engine(checkpoint, *disk) as served:
        ask(served, 1)
    with engine(checkpoint, *disk) as served:
        wait_for_scan(served)
        assert served.probe(prompt(1), Caller("acme")).result(PATIENCE_S).stored_tokens == FULL_BLOCK_TOKENS
        (stats,) = served.stats(tenant="acme").result(PATIENCE_S).tenants
        assert stats.stored_blocks == {"disk": 5}
    with engine(checkpoint, *disk) as served:
        wait_for_scan(served)
        grant = served.retain(prompt(1), Retention(90), Caller("acme")).result(PATIENCE_S).grant
        assert grant.granted_tokens > 0


def test_an_encrypted_disk_is_read_with_its_key_alone(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("5a" * 32 + "\n")
    (tmp_path / "other").write_text("a5" * 32)
    disk = f"tiers.disk_path={tmp_path}/disk"
    key = f"tiers.encryption_key_file={tmp_path}/key"
    with engine(checkpoint, disk, key) as served:
        before = ask(served, 1).logits
    files = [path for path in (tmp_path / "disk").rglob("*") if path.is_file()]
    assert files
    first_block = prompt(1)[: 4 * BLOCK_SIZE]
    assert all(first_block not in path.read_bytes() for path in files), "tokens are encrypted as well"
    with engine(checkpoint, disk, key) as served:
        settle(served)
        result = ask(served, 1)
        assert result.usage.disk_tokens == FULL_BLOCK_TOKENS
        np.testing.assert_array_equal(result.logits, before)
    for settings in ([disk], [disk, f"tiers.encryption_key_file={tmp_path}/other"]):
        with engine(checkpoint, *settings) as served:
            settle(served)
            result = ask(served, 1)
            assert result.usage.cached_tokens == 0
            np.testing.assert_array_equal(result.logits, before)
        assert re.search("expected unmodified blocks of this model, got .* unsealed", caplog.text)
        caplog.clear()


def test_a_purge_reaches_an_encrypted_disk_of_an_earlier_process(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("5a" * 32)
    settings = (f"tiers.disk_path={tmp_path}/disk", f"tiers.encryption_key_file={tmp_path}/key")
    with engine(checkpoint, *settings) as served:
        ask(served, 1)
    with engine(checkpoint, *settings) as served:
        assert served.purge(tenant="acme").result(PATIENCE_S).stored_blocks == {"disk": 5}


@pytest.mark.parametrize("setting", ["cache.block_size=32", "cache.kv_dtype=int8"])
def test_blocks_of_another_format_are_not_found(checkpoint: Path, tmp_path: Path, setting: str) -> None:
    disk = f"tiers.disk_path={tmp_path}"
    with engine(checkpoint, disk) as served:
        ask(served, 1)
    with engine(checkpoint, disk, setting) as served:
        settle(served)
        assert ask(served, 1).usage.cached_tokens == 0


def working_tiers(engine: Engine) -> dict[str, float]:
    """Return the metric `radixkv_tier_working` by tier: 1 if the store works, else 0."""
    metrics = EngineGauges(engine, PATIENCE_S).collect()
    (family,) = [each for each in metrics if each.name == "radixkv_tier_working"]
    return {sample.labels["tier"]: sample.value for sample in family.samples}


def test_an_unreachable_redis_is_reported_before_the_first_request(checkpoint: Path, tmp_path: Path) -> None:
    stores = (
        f"tiers.disk_path={tmp_path}",
        "tiers.disk_bytes=10000000",
        "tiers.redis_url=redis://127.0.0.1:1/0",
        TRUSTED,
    )
    with engine(checkpoint, *stores) as served:
        wait_until(lambda: working_tiers(served) == {"disk": 1, "redis": 0})


def test_a_store_that_cannot_be_opened_is_left_out(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no directory")
    with caplog.at_level(logging.ERROR), engine(checkpoint, f"tiers.disk_path={tmp_path}/file/below") as served:
        assert ask(served, 1).usage.computed_tokens == PROMPT_TOKENS
        assert working_tiers(served) == {"disk": 0}
    assert "tier disk is off: tiers.disk_path: expected a directory to write to" in caplog.text


def test_a_second_server_runs_without_the_directory(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = f"tiers.disk_path={tmp_path}"
    with engine(checkpoint, disk) as first:
        with caplog.at_level(logging.ERROR), engine(checkpoint, disk, "tiers.host_bytes=1000000") as second:
            assert second.offload is not None
            assert list(second.offload.tiers) == ["host"]
        assert "another process uses this directory" in caplog.text
        assert ask(first, 1).usage.computed_tokens == PROMPT_TOKENS


def test_a_disk_size_without_a_directory_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.disk_path: expected a directory with tiers\.disk_bytes"):
        build_engine(config(checkpoint, "tiers.disk_bytes=1000"))


def test_host_memory_below_a_block_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.host_bytes: expected at least \d+ bytes, got 1000"):
        build_engine(config(checkpoint, "tiers.host_bytes=1000"))


def redis_or_skip(folder: Path, *settings: str) -> contextlib.AbstractContextManager[RedisServer]:
    """Return a Redis server for the time of a block; skips the test if none is installed."""
    if SERVER is None:
        pytest.skip(WHY_NOT)
    folder.mkdir(exist_ok=True)
    return redis_server(folder, *settings)


def write_secret(folder: Path, secret: str = "between the two of us\n") -> str:
    """Write a secret file, and return the setting that names it."""
    (folder / "secret").write_text(secret)
    return f"tiers.secret_file={folder}/secret"


def wait_for_redis(engine: Engine, num_blocks: int) -> None:
    """Wait until an engine has saved this number of blocks to Redis."""
    assert engine.offload is not None
    counts = engine.offload.tiers["redis"].counts
    wait_until(lambda: sum(counts().saved.values()) >= num_blocks)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_servers_that_share_a_redis_find_each_other_s_blocks(checkpoint: Path, tmp_path: Path, kv_dtype: str) -> None:
    with redis_or_skip(tmp_path) as server:
        settings = (f"tiers.redis_url={server.url}", write_secret(tmp_path), f"cache.kv_dtype={kv_dtype}")
        with engine(checkpoint, *settings) as first, engine(checkpoint, *settings) as second:
            before = ask(first, 1).logits
            wait_for_redis(first, 5)
            result = ask(second, 1)
            assert (result.usage.remote_tokens, result.usage.cached_tokens) == (FULL_BLOCK_TOKENS, FULL_BLOCK_TOKENS)
            np.testing.assert_array_equal(result.logits, before)
            np.testing.assert_array_equal(result.logits, cold_logits(second, 1))
            assert second.purge(tenant="acme").result(PATIENCE_S).stored_blocks == {"redis": 5}
        with engine(checkpoint, *settings) as third:
            assert ask(third, 1).usage.cached_tokens == 0


def test_a_server_remembers_few_blocks_of_a_shared_store_and_asks_the_store_for_the_others(
    checkpoint: Path, tmp_path: Path
) -> None:
    with redis_or_skip(tmp_path) as server:
        settings = (f"tiers.redis_url={server.url}", write_secret(tmp_path), "tiers.known_blocks=3")
        with engine(checkpoint, *settings) as served:
            for seed in range(1, 6):
                ask(served, seed)
                wait_for_redis(served, 5 * seed)
            assert served.offload is not None
            assert len(served.offload.index.tiers["redis"]) == POOL_TOKENS // BLOCK_SIZE, (
                "the bound is raised to the blocks of the pool, which a prompt may have"
            )
            found = ask(served, 1)
            assert (found.usage.remote_tokens, found.usage.cached_tokens) == (FULL_BLOCK_TOKENS, FULL_BLOCK_TOKENS)
            np.testing.assert_array_equal(found.logits, cold_logits(served, 1))


@pytest.mark.parametrize("differs_in", ["block size", "secret"])
def test_servers_that_differ_share_nothing(checkpoint: Path, tmp_path: Path, differs_in: str) -> None:
    setting = "cache.block_size=32" if differs_in == "block size" else write_secret(tmp_path)
    with redis_or_skip(tmp_path / "redis") as server:
        url = f"tiers.redis_url={server.url}"
        with engine(checkpoint, url, TRUSTED) as first:
            ask(first, 1)
            wait_for_redis(first, 5)
        with engine(checkpoint, url, TRUSTED, setting) as second:
            assert ask(second, 1).usage.cached_tokens == 0
            assert second.purge().result(PATIENCE_S).stored_blocks is not None
        with engine(checkpoint, url, TRUSTED) as third:
            assert ask(third, 1).usage.remote_tokens == FULL_BLOCK_TOKENS


def test_altered_blocks_of_a_redis_are_computed_and_reported(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_or_skip(tmp_path) as server:
        settings = (f"tiers.redis_url={server.url}", write_secret(tmp_path))
        with engine(checkpoint, *settings) as first:
            before = ask(first, 1).logits
            wait_for_redis(first, 5)
        client = Redis.from_url(server.url)
        for name in client.scan_iter():
            data = bytearray(client.get(name))
            data[-1000] ^= 4
            content = bytes(data[:-16])
            client.set(name, content + xxh3_128_digest(content))  # a right checksum, but without the secret
        with engine(checkpoint, *settings) as second:
            result = ask(second, 1)
            assert result.usage.cached_tokens == 0
            np.testing.assert_array_equal(result.logits, before)
            rejected = rejected_blocks(second)
            wait_for_redis(second, 5)
        with engine(checkpoint, *settings) as third:  # the second engine replaced the altered blocks
            assert ask(third, 1).usage.remote_tokens == FULL_BLOCK_TOKENS
            assert rejected_blocks(third) == {}
        client.close()
    assert rejected == {("redis", "unauthentic"): 5}
    messages = [each.message for each in caplog.records if "unauthentic" in each.message]
    assert messages == ["tier redis: expected unmodified blocks of this model, got 5 that are unauthentic"]


@pytest.mark.parametrize("has_secret", [True, False])
def test_altered_blocks_of_a_disk_are_computed_if_there_is_a_secret(
    checkpoint: Path, tmp_path: Path, *, has_secret: bool
) -> None:
    """Without a secret, only the owner and the mode of the directory protect it; this test has write access."""
    settings = [f"tiers.disk_path={tmp_path}/disk", *([write_secret(tmp_path)] if has_secret else [])]
    with engine(checkpoint, *settings) as first:
        before = ask(first, 1).logits
    (directory,) = (tmp_path / "disk").iterdir()
    heads, blocks = (bytearray((directory / name).read_bytes()) for name in ("heads", "blocks"))
    sizes, body_bytes = slot_sizes_of(directory)
    for slot in range(5):  # change a bit of each block, and write a checksum that is right without a secret
        head = heads[slot * sizes.head_slot_bytes :][: sizes.head_bytes]
        blocks[slot * sizes.body_slot_bytes + 900] ^= 64
        body = blocks[slot * sizes.body_slot_bytes :][:body_bytes]
        start = slot * sizes.head_slot_bytes + sizes.head_bytes
        heads[start : start + 16] = xxh3_128_digest(bytes(head + body))
    (directory / "heads").write_bytes(heads)
    (directory / "blocks").write_bytes(blocks)
    with engine(checkpoint, *settings) as second:
        settle(second)
        result = ask(second, 1)
        assert result.usage.disk_tokens == (0 if has_secret else FULL_BLOCK_TOKENS)
        assert np.array_equal(result.logits, before) == has_secret
        assert rejected_blocks(second) == ({("disk", "unauthentic"): 5} if has_secret else {})


def test_blocks_on_disk_are_not_used_with_another_secret(checkpoint: Path, tmp_path: Path) -> None:
    disk = f"tiers.disk_path={tmp_path}/disk"
    with engine(checkpoint, disk, write_secret(tmp_path)) as first:
        before = ask(first, 1).logits
    with engine(checkpoint, disk, write_secret(tmp_path, "another secret of 16 bytes or more")) as second:
        settle(second)
        result = ask(second, 1)
        assert result.usage.cached_tokens == 0
        np.testing.assert_array_equal(result.logits, before)
        assert rejected_blocks(second) == {("disk", "foreign"): 5}


def slot_sizes_of(directory: Path) -> tuple[SlotSizes, int]:
    """Return the sizes of a slot in the directory of a disk, and the bytes of an object after its head."""
    payload_bytes = json.loads((directory / "format.json").read_text())["payload_bytes"]
    num_bytes = object_bytes(BLOCK_SIZE, payload_bytes)
    sizes = SlotSizes.of(max(num_bytes, object_bytes(BLOCK_SIZE, payload_bytes, is_sealed=True)), payload_bytes)
    return sizes, num_bytes - 16 - sizes.head_bytes


def rejected_blocks(engine: Engine) -> dict[tuple[str, str], float]:
    """Return the metric of blocks that failed verification, by source and reason; reasons without blocks are absent."""
    metrics = EngineGauges(engine, PATIENCE_S).collect()
    (family,) = [each for each in metrics if each.name == "radixkv_rejected_blocks"]
    return {(each.labels["source"], each.labels["reason"]): each.value for each in family.samples}


def test_an_unreachable_redis_fails_no_request(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_or_skip(tmp_path) as server, engine(checkpoint, f"tiers.redis_url={server.url}", TRUSTED) as served:
        server.stop()
        for seed in range(6):
            assert ask(served, seed).usage.computed_tokens == PROMPT_TOKENS
        assert served.offload is not None
        wait_until(lambda: not served.offload.stats()[0].is_working)
        assert served.purge(tenant="acme").result(PATIENCE_S).stored_blocks == {"redis": None}
    assert "store redis: switched off for a while after failures" in caplog.text


def test_a_wrong_password_is_reported_without_showing_it(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_or_skip(tmp_path, "--requirepass", "correct") as server:
        url = server.url.replace("redis://", "redis://:hunter2@")
        with engine(checkpoint, f"tiers.redis_url={url}", TRUSTED) as served:
            for seed in range(6):
                assert ask(served, seed).usage.computed_tokens == PROMPT_TOKENS
            assert served.offload is not None
            wait_until(lambda: not served.offload.stats()[0].is_working)
    assert "tiers.redis_url: expected an answer, got AuthenticationError" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tiers.redis_url=http://x"], "tiers.redis_url: expected redis://HOST:PORT/DB, got something else"),
        (["tiers.secret_file=/nowhere"], "tiers.secret_file: expected a readable file, got /nowhere"),
        (["tiers.encryption_key_file=/dev/null"], "tiers.encryption_key_file: expected a readable file, got /dev/null"),
    ],
)
def test_bad_settings_of_shared_stores_are_refused(checkpoint: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_engine(config(checkpoint, "tiers.host_bytes=10000000", *settings))


def open_shelf(options: StoreOptions) -> StoreBackend:
    """Open a store, as the entry point of another package would."""
    return HostStore(map_memory(options.max_bytes or 0), options.object_bytes)


class StoreWithoutCapacity(HostStore):
    """A store that reports no capacity, and so would have to be purgeable, which it is not."""

    def size(self) -> StoreSize:
        return StoreSize(None, None, None)


def open_unbounded(options: StoreOptions) -> StoreBackend:
    return StoreWithoutCapacity(map_memory(options.max_bytes or 0), options.object_bytes)


@pytest.fixture
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points of stores named `shelf` and `unbounded`, as if a package with them were installed."""
    points = [EntryPoint(name, f"{__name__}:open_{name}", open_store.ENTRY_POINTS) for name in ("shelf", "unbounded")]
    monkeypatch.setitem(sys.modules, __name__, sys.modules[open_shelf.__module__])
    monkeypatch.setattr(open_store, "entry_points", lambda **criteria: EntryPoints(points).select(**criteria))


@pytest.mark.usefixtures("plug_ins")
def test_a_plug_in_store_is_below_the_device(checkpoint: Path) -> None:
    with engine(checkpoint, "stores.shelf.max_bytes=10000000", "stores.shelf.trusted=true") as served:
        for seed in range(12):
            ask(served, seed)
        settle(served)
        result = ask(served, 0)
        assert result.usage.remote_tokens == FULL_BLOCK_TOKENS
        np.testing.assert_array_equal(result.logits, cold_logits(served, 0))


@pytest.mark.usefixtures("plug_ins")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "stores.unbounded.max_bytes=10000000",
            "store unbounded: a store without `max_objects` must implement `purge`",
        ),
        ("stores.drawer.place=x", "stores.drawer: expected the name of an installed package's entry point"),
        ("stores.redis.place=x", "stores.redis: expected the name of a plug-in's entry point"),
        ("stores.shelf.max_bytes=0", "stores.shelf.max_bytes: expected 1 to"),
    ],
)
def test_bad_stores_of_other_packages_are_refused(checkpoint: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_engine(config(checkpoint, setting, f"{setting.rpartition('.')[0]}.trusted=true"))


def test_without_tiers_there_are_no_stores(checkpoint: Path) -> None:
    with engine(checkpoint) as served:
        assert served.offload is None


def test_a_process_with_other_numerics_finds_no_blocks(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second engine computes another rounding, as with other kernels for the same model on the same machine."""
    monkeypatch.setattr("radixkv.model.model.native_library", lambda: None)
    disk = f"tiers.disk_path={tmp_path}"
    with engine(checkpoint, disk) as served:
        ask(served, 1)
    silu = torch.nn.functional.silu
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "silu", lambda *args, **kw: silu(*args, **kw).nextafter(torch.ones(1)))
        patch.setattr(torch.nn.SiLU, "forward", lambda _, x: silu(x).nextafter(torch.ones(1)))
        with engine(checkpoint, disk) as served:
            settle(served)
            assert ask(served, 1).usage.cached_tokens == 0
    with engine(checkpoint, disk) as served:
        settle(served)
        assert ask(served, 1).usage.disk_tokens == FULL_BLOCK_TOKENS
