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
BLOCK_SIZE, POOL_TOKENS, PROMPT_TOKENS = 16, 256, 83  # five whole blocks of a pool of 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(CONFIGS["llama"], tmp_path_factory.mktemp("tiers") / "llama")


def config(checkpoint: Path, *settings: str) -> Config:
    pool = ("model.device=cpu", f"cache.capacity_tokens={POOL_TOKENS}", f"cache.block_size={BLOCK_SIZE}")
    return Config.load(None, [f"model.path={checkpoint}", *pool, *settings])


@contextlib.contextmanager
def engine(checkpoint: Path, *settings: str, choice: LoadOrCompute | None = None) -> Iterator[Engine]:
    """An engine that loads what is stored, unless another choice is given."""
    with running(build_engine(config(checkpoint, *settings), choice=choice or AlwaysLoad(BLOCK_SIZE))) as engine:
        yield engine


def prompt(seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 100, PROMPT_TOKENS).astype("<u4").tobytes()


def ask(engine: Engine, seed: int, **params: bool) -> PrefillResult:
    return engine.prefill(PrefillParams(prompt(seed), Caller("acme"), return_logits=True, **params)).result(PATIENCE_S)


def cold_logits(engine: Engine, seed: int) -> object:
    return ask(engine, seed, read_cache=False, write_cache=False).logits


@pytest.fixture(scope="module")
def latent_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(MODELS["deepseek_v3"], tmp_path_factory.mktemp("tiers") / "latent")


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
        spare_bytes = size.used_bytes / size.num_objects - object_bytes(BLOCK_SIZE, BLOCK_SIZE * token_bytes)
        assert 0 <= spare_bytes < 64, "an object begins where a line of the processor's cache does"
        loaded = [ask(served, seed) for seed in range(6)]
        assert [each.usage.host_tokens for each in loaded] == [80] * 6
        for seed, result in enumerate(loaded):
            np.testing.assert_array_equal(result.logits, before[seed])
            np.testing.assert_array_equal(result.logits, cold_logits(served, seed))
    with engine(latent_checkpoint, *tiers[1:], f"cache.kv_dtype={kv_dtype}") as served:
        settle(served)
        restarted = ask(served, 0)
        assert restarted.usage.disk_tokens == 80
        np.testing.assert_array_equal(restarted.logits, before[0])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_loaded_prompt_has_the_bits_of_one_computed_alone(checkpoint: Path, kv_dtype: str) -> None:
    with engine(checkpoint, "tiers.host_bytes=10000000", f"cache.kv_dtype={kv_dtype}") as served:
        for seed in range(12):
            ask(served, seed)
        settle(served)
        results = [ask(served, seed) for seed in range(6)]
        assert [each.usage.host_tokens for each in results] == [80] * 6
        for seed, result in enumerate(results):
            np.testing.assert_array_equal(result.logits, cold_logits(served, seed))


class Counting:
    """Copies in C++, and how many calls of each were not declined."""

    def __init__(self, native: NativeCopies) -> None:
        self.num_done: Counter[str] = Counter()
        self._native = native

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*given: object) -> object:
            result = getattr(self._native, name)(*given)
            self.num_done[name] += bool(result)
            return result

        return call


def test_stores_and_the_pool_are_given_copies_in_cpp(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = Counting(native_or_skip())
    monkeypatch.setattr(copies, "MIN_FILLED_BYTES", 0)
    monkeypatch.setattr(tiers, "native_copies", lambda: native)
    settings = ("tiers.host_bytes=10000000", f"tiers.disk_path={tmp_path}", "tiers.disk_bytes=10000000")
    for has_host in (True, False):
        with engine(checkpoint, *settings[not has_host :]) as served:
            settle(served)  # the disk is known
            for seed in range(12 if has_host else 1):
                ask(served, seed)
                settle(served)
    assert set(native.num_done) == {"copy_checked", "read_checked", "write_checked", "fill"}
    assert all(native.num_done.values())


def test_an_engine_uses_the_choice_between_loading_and_computing_that_is_passed_to_it(checkpoint: Path) -> None:
    choice = LoadOrCompute(BLOCK_SIZE)
    for num_blocks in (1, 5):
        choice.note_start("host", num_blocks)
        choice.note_end("host", num_blocks, 1e6 * num_blocks)
    with engine(checkpoint, "tiers.host_bytes=10000000", choice=choice) as served:
        for seed in range(12):
            ask(served, seed)
        settle(served)
        usage = ask(served, 0).usage
        assert (usage.host_tokens, usage.computed_tokens) == (0, PROMPT_TOKENS), "loads are supposed to take days"
        assert served.offload is not None
        assert served.offload.stats()[0].computed_blocks == 5


def test_a_floor_and_a_retention_hold_in_stores(checkpoint: Path) -> None:
    bounds = ("tenants.acme.floor_tokens=96", "tiers.host_bytes=200000")  # six of sixteen blocks
    with engine(checkpoint, *bounds) as served:
        assert served.offload is not None
        num_blocks = served.offload.index.tiers["host"].num_blocks
        assert 6 * num_blocks // 16 >= 5
        for seed in (0, 100):  # more than acme's floor on the device
            ask(served, seed)
        for seed in range(1, 4 + num_blocks // 3):
            served.prefill(PrefillParams(prompt(seed), Caller("other"))).result(PATIENCE_S)
            if seed == 3:
                settle(served)
                keep = served.retain(prompt(1), Retention(90), Caller("other")).result(PATIENCE_S)
                assert keep.grant.granted_tokens > 0
        settle(served)
        assert ask(served, 0).usage.host_tokens == 80, "acme's floor keeps it"
        kept = served.prefill(PrefillParams(prompt(1), Caller("other"))).result(PATIENCE_S)
        assert kept.usage.cached_tokens == keep.grant.granted_tokens // BLOCK_SIZE * BLOCK_SIZE
        assert served.segments.stored("host", 0, "acme", 10).result(PATIENCE_S).namespaces[0].num_blocks >= 5


def test_a_restart_finds_cached_blocks(checkpoint: Path, tmp_path: Path) -> None:
    """It finds blocks that were evicted, and those that were on the device at the end."""
    disk = f"tiers.disk_path={tmp_path}"
    with engine(checkpoint, disk, "tiers.disk_bytes=10000000") as served:
        before = [ask(served, seed).logits for seed in range(6)]
        assert served.offload is not None
    with engine(checkpoint, disk, "tiers.disk_bytes=10000000") as served:
        settle(served)  # what the disk holds is known
        for seed, logits in enumerate(before):
            result = ask(served, seed)
            assert result.usage.disk_tokens == 80
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
        assert ask(served, 2).usage.disk_tokens == 80


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
        order = [key for seed in (2, 3, 1) for key in reversed([each.key for each in keys(namespace, prompt(seed))])]
        assert list(tier_index) == order


def test_retention_survives_a_restart(checkpoint: Path, tmp_path: Path) -> None:
    """The disk, of 25 blocks, evicts other blocks for those of later prompts."""
    block_bytes = object_bytes(BLOCK_SIZE, BLOCK_SIZE * 3 * 2 * 2 * 16 * 4) + 4096
    disk = (f"tiers.disk_path={tmp_path}", f"tiers.disk_bytes={25 * block_bytes}")
    with engine(checkpoint, *disk) as served:
        for seed in (1, 2):
            ask(served, seed)
        granted = served.retain(prompt(1), Retention(90, ttl_s=3600.0), Caller("acme")).result(PATIENCE_S).grant
        assert granted.granted_tokens > 0
    with engine(checkpoint, *disk) as served:
        settle(served)
        for seed in range(10, 20):
            ask(served, seed)
        settle(served)
        assert ask(served, 2).usage.cached_tokens == 0
        assert ask(served, 1).usage.disk_tokens == granted.granted_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_a_restart_reports_stored_blocks_immediately(checkpoint: Path, tmp_path: Path) -> None:
    disk = (f"tiers.disk_path={tmp_path}", "tiers.disk_bytes=10000000")
    with engine(checkpoint, *disk) as served:
        ask(served, 1)
    with engine(checkpoint, *disk) as served:
        assert served.offload is not None
        assert set(served.offload.wait_for_scan()) <= {None}
        assert served.probe(prompt(1), Caller("acme")).result(PATIENCE_S).stored_tokens == 80
        (stats,) = served.stats(tenant="acme").result(PATIENCE_S).tenants
        assert stats.stored_blocks == {"disk": 5}
    with engine(checkpoint, *disk) as served:
        assert served.offload is not None
        assert set(served.offload.wait_for_scan()) <= {None}
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
    assert all(prompt(1)[:64] not in path.read_bytes() for path in (tmp_path / "disk").glob("*/*"))
    with engine(checkpoint, disk, key) as served:
        settle(served)
        result = ask(served, 1)
        assert result.usage.disk_tokens == 80
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
    """The metric of the stores that work, by name."""
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


def redis(folder: Path, *settings: str) -> contextlib.AbstractContextManager[RedisServer]:
    if SERVER is None:
        pytest.skip(WHY_NOT)
    folder.mkdir(exist_ok=True)
    return redis_server(folder, *settings)


def secret_at(folder: Path, secret: str = "between the two of us\n") -> str:
    (folder / "secret").write_text(secret)
    return f"tiers.secret_file={folder}/secret"


def wait_for_redis(engine: Engine, num_blocks: int) -> None:
    assert engine.offload is not None
    counts = engine.offload.tiers["redis"].counts
    wait_until(lambda: sum(counts().saved.values()) >= num_blocks)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_servers_that_share_a_redis_find_each_other_s_blocks(checkpoint: Path, tmp_path: Path, kv_dtype: str) -> None:
    with redis(tmp_path) as server:
        settings = (f"tiers.redis_url={server.url}", secret_at(tmp_path), f"cache.kv_dtype={kv_dtype}")
        with engine(checkpoint, *settings) as first, engine(checkpoint, *settings) as second:
            before = ask(first, 1).logits
            wait_for_redis(first, 5)
            result = ask(second, 1)
            assert (result.usage.remote_tokens, result.usage.cached_tokens) == (80, 80)
            np.testing.assert_array_equal(result.logits, before)
            np.testing.assert_array_equal(result.logits, cold_logits(second, 1))
            assert second.purge(tenant="acme").result(PATIENCE_S).stored_blocks == {"redis": 5}
        with engine(checkpoint, *settings) as third:
            assert ask(third, 1).usage.cached_tokens == 0


def test_a_server_remembers_few_blocks_of_a_shared_store_and_finds_the_others_by_asking(
    checkpoint: Path, tmp_path: Path
) -> None:
    with redis(tmp_path) as server:
        settings = (f"tiers.redis_url={server.url}", secret_at(tmp_path), "tiers.known_blocks=3")
        with engine(checkpoint, *settings) as served:
            for seed in range(1, 6):
                ask(served, seed)
                wait_for_redis(served, 5 * seed)
            assert served.offload is not None
            assert len(served.offload.index.tiers["redis"]) == POOL_TOKENS // BLOCK_SIZE, (
                "a prompt fills at most the pool"
            )
            found = ask(served, 1)
            assert (found.usage.remote_tokens, found.usage.cached_tokens) == (80, 80)
            np.testing.assert_array_equal(found.logits, cold_logits(served, 1))


@pytest.mark.parametrize("setting", ["cache.block_size=32", "tiers.secret_file="])
def test_servers_that_differ_share_nothing(checkpoint: Path, tmp_path: Path, setting: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("between the two of us\n")
    with redis(tmp_path / "redis") as server:
        url = f"tiers.redis_url={server.url}"
        with engine(checkpoint, url, TRUSTED) as first:
            ask(first, 1)
            wait_for_redis(first, 5)
        with engine(checkpoint, url, TRUSTED, setting + str(secret) * setting.endswith("=")) as second:
            assert ask(second, 1).usage.cached_tokens == 0
            assert second.purge().result(PATIENCE_S).stored_blocks is not None
        with engine(checkpoint, url, TRUSTED) as third:
            assert ask(third, 1).usage.remote_tokens == 80


def test_altered_blocks_of_a_redis_are_computed_and_reported(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis(tmp_path) as server:
        settings = (f"tiers.redis_url={server.url}", secret_at(tmp_path))
        with engine(checkpoint, *settings) as first:
            before = ask(first, 1).logits
            wait_for_redis(first, 5)
        client = Redis.from_url(server.url)
        for name in client.scan_iter():
            data = bytearray(client.get(name))
            data[-1000] ^= 4
            client.set(name, bytes(data[:-16]) + xxh3_128_digest(bytes(data[:-16])))
        with engine(checkpoint, *settings) as second:
            result = ask(second, 1)
            assert result.usage.cached_tokens == 0
            np.testing.assert_array_equal(result.logits, before)
            rejected = rejected_blocks(second)
            wait_for_redis(second, 5)
        with engine(checkpoint, *settings) as third:  # the altered blocks were deleted, and written again
            assert ask(third, 1).usage.remote_tokens == 80
            assert rejected_blocks(third) == {}
        client.close()
    assert rejected == {("redis", "unauthentic"): 5}
    messages = [each.message for each in caplog.records if "unauthentic" in each.message]
    assert messages == ["tier redis: expected unmodified blocks of this model, got 5 that are unauthentic"]


@pytest.mark.parametrize("protected", [True, False])
def test_altered_blocks_of_a_disk_are_computed_if_there_is_a_secret(
    checkpoint: Path, tmp_path: Path, *, protected: bool
) -> None:
    """Without a secret, only the owner and the mode of the directory protect it; this test has write access."""
    settings = [f"tiers.disk_path={tmp_path}/disk", *([secret_at(tmp_path)] if protected else [])]
    with engine(checkpoint, *settings) as first:
        before = ask(first, 1).logits
    (directory,) = (tmp_path / "disk").iterdir()
    heads, blocks = (bytearray((directory / name).read_bytes()) for name in ("heads", "blocks"))
    sizes, body_bytes = slot_sizes_of(directory)
    for slot in range(5):
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
        assert result.usage.disk_tokens == (0 if protected else 80)
        assert np.array_equal(result.logits, before) == protected
        assert rejected_blocks(second) == ({("disk", "unauthentic"): 5} if protected else {})


def test_another_secret_makes_blocks_on_disk_useless(checkpoint: Path, tmp_path: Path) -> None:
    disk = f"tiers.disk_path={tmp_path}/disk"
    with engine(checkpoint, disk, secret_at(tmp_path)) as first:
        before = ask(first, 1).logits
    with engine(checkpoint, disk, secret_at(tmp_path, "a later one of theirs")) as second:
        settle(second)
        result = ask(second, 1)
        assert result.usage.cached_tokens == 0
        np.testing.assert_array_equal(result.logits, before)
        assert rejected_blocks(second) == {("disk", "foreign"): 5}


def slot_sizes_of(directory: Path) -> tuple[SlotSizes, int]:
    """The sizes of a slot in the directory of a disk, and the bytes of an object beyond its head."""
    payload_bytes = json.loads((directory / "format.json").read_text())["payload_bytes"]
    num_bytes = object_bytes(BLOCK_SIZE, payload_bytes)
    sizes = SlotSizes.of(max(num_bytes, object_bytes(BLOCK_SIZE, payload_bytes, is_sealed=True)), payload_bytes)
    return sizes, num_bytes - 16 - sizes.head_bytes


def rejected_blocks(engine: Engine) -> dict[tuple[str, str], float]:
    """The metric of blocks that failed verification, by source and reason."""
    metrics = EngineGauges(engine, PATIENCE_S).collect()
    (family,) = [each for each in metrics if each.name == "radixkv_rejected_blocks"]
    return {(each.labels["source"], each.labels["reason"]): each.value for each in family.samples}


def test_an_unreachable_redis_fails_no_request(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis(tmp_path) as server, engine(checkpoint, f"tiers.redis_url={server.url}", TRUSTED) as served:
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
    with redis(tmp_path, "--requirepass", "correct") as server:
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
    """A plug-in, as another package would have one."""
    return HostStore(map_memory(options.max_bytes or 0), options.object_bytes)


class Nameless(HostStore):
    """Reports no capacity, and cannot be purged."""

    def size(self) -> StoreSize:
        return StoreSize(None, None, None)


def open_nameless(options: StoreOptions) -> StoreBackend:
    return Nameless(map_memory(options.max_bytes or 0), options.object_bytes)


@pytest.fixture
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, f"{__name__}:open_{name}", open_store.ENTRY_POINTS) for name in ("shelf", "nameless")]
    monkeypatch.setitem(sys.modules, __name__, sys.modules[open_shelf.__module__])
    monkeypatch.setattr(open_store, "entry_points", lambda **wanted: EntryPoints(points).select(**wanted))


@pytest.mark.usefixtures("plug_ins")
def test_a_plug_in_store_is_below_the_device(checkpoint: Path) -> None:
    with engine(checkpoint, "stores.shelf.max_bytes=10000000", "stores.shelf.trusted=true") as served:
        for seed in range(12):
            ask(served, seed)
        settle(served)
        result = ask(served, 0)
        assert result.usage.remote_tokens == 80
        np.testing.assert_array_equal(result.logits, cold_logits(served, 0))


@pytest.mark.usefixtures("plug_ins")
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("stores.nameless.max_bytes=10000000", "store nameless: a store without `max_objects` must implement `purge`"),
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
    """Libraries may have chosen other kernels for the same model on the same machine."""
    monkeypatch.setattr("radixkv.model.model.native_library", lambda: None)
    disk = f"tiers.disk_path={tmp_path}"
    with engine(checkpoint, disk) as served:
        ask(served, 1)
    rounded = torch.nn.functional.silu
    with pytest.MonkeyPatch.context() as other:
        other.setattr(torch.nn.functional, "silu", lambda *args, **kw: rounded(*args, **kw).nextafter(torch.ones(1)))
        other.setattr(torch.nn.SiLU, "forward", lambda _, x: rounded(x).nextafter(torch.ones(1)))
        with engine(checkpoint, disk) as served:
            settle(served)
            assert ask(served, 1).usage.cached_tokens == 0
    with engine(checkpoint, disk) as served:
        settle(served)
        assert ask(served, 1).usage.disk_tokens == 80
