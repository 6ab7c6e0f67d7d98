"""The pool of a GPU takes the memory that the model and the largest step leave; the device is a fake."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixkv.config import CacheConfig, Config, EngineConfig, ModelConfig
from radixkv.errors import ConfigError
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.startup import build_engine as build_engine_module
from radixkv.startup import pool_size
from radixkv.startup.build_engine import build_engine, make_runner
from radixkv.startup.pool_size import available_bytes, choose_num_blocks, reserve_step_memory, run_largest_step
from radixkv.storage.device_pool import KVStorage

ENGINE = EngineConfig(max_step_tokens=24, max_running_requests=4)
GIB = 2**30
NO_GRAPHS: Any = SimpleNamespace(capture=lambda *_, **__: None)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(ModelConfig(device="cpu"))


class RecordingKernels(TorchKernels):
    """Records the lengths of the queries and of the K/V of each step for which it computes attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lens: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def paged_attention(self, query: torch.Tensor, pool: Any, layer: int, batch: Any, scoring: Any) -> torch.Tensor:
        query_lens = tuple(end - start for start, end in itertools.pairwise(batch.query_starts))
        self.lens.add((query_lens, tuple(batch.kv_lens)))
        return super().paged_attention(query, pool, layer, batch, scoring)


def one_block(model: Model) -> KVStorage:
    return KVStorage(1, 16, model.kv_shape, model.device)


def choose(model: Model, memory: tuple[int, int] | None, **cache: Any) -> int:
    """Return the number of blocks on a device with these free and total bytes; None for a device without a report."""
    get_memory = None if memory is None else lambda: memory
    return choose_num_blocks(model, TorchKernels(), model.kv_shape, CacheConfig(**cache), ENGINE, NO_GRAPHS, get_memory)


def test_the_largest_step_has_every_token_and_request_and_the_longest_sequence(model: Model) -> None:
    kernels = RecordingKernels()
    run_largest_step(model, kernels, one_block(model), ENGINE)
    assert model.max_tokens is not None
    kv_lens = (model.max_tokens, 1, 1, 1)
    # The last layer only computes the rows whose logits are needed.
    assert kernels.lens == {((21, 1, 1, 1), kv_lens), ((1, 1, 1, 1), kv_lens)}


def test_a_step_may_have_fewer_tokens_than_there_may_be_requests(model: Model) -> None:
    kernels = RecordingKernels()
    run_largest_step(model, kernels, one_block(model), EngineConfig(max_step_tokens=2, max_running_requests=9))
    assert kernels.lens == {((1, 1), (model.max_tokens, 1))}


def test_no_sequence_is_longer_than_the_model_allows(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "max_tokens", 10)
    kernels = RecordingKernels()
    run_largest_step(model, kernels, one_block(model), ENGINE)
    assert kernels.lens == {((10, 10, 3, 1), (10, 10, 3, 1)), ((1, 1, 1, 1), (10, 10, 3, 1))}
    kernels.lens.clear()
    run_largest_step(model, kernels, one_block(model), EngineConfig(max_step_tokens=64, max_running_requests=2))
    assert kernels.lens == {((10, 10), (10, 10)), ((1, 1), (10, 10))}


def test_the_pool_has_the_configured_size(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_size, "run_largest_step", lambda *_: pytest.fail("the largest step was run"))
    assert choose(model, (GIB, GIB), capacity_tokens=6400) == 100
    assert choose(model, None) == 131_072 // 64


@pytest.mark.parametrize(
    ("token_bytes", "num_parameters", "available", "expected"),
    [
        (1024, 1_000, None, 131_072),
        (1024, 1_000, 4 * GIB, 131_072),
        (46_080, 10**6, 24 * GIB, GIB // 46_080),
        (46_080, 2**28, 24 * GIB, 2 * GIB // 46_080),  # 1 GiB of weights in float32
        (46_080, 2**28, 2 * GIB, GIB // 46_080),
        (46_080, 2**28, 10_000, 64),
    ],
)
def test_a_pool_on_a_cpu_follows_the_model_and_the_available_memory(
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    token_bytes: int,
    num_parameters: int,
    available: int | None,
    expected: int,
) -> None:
    monkeypatch.setattr(pool_size, "available_bytes", lambda: available)
    monkeypatch.setattr(model, "num_parameters", num_parameters)
    shape: Any = SimpleNamespace(token_bytes=token_bytes)
    num_blocks = choose_num_blocks(model, TorchKernels(), shape, CacheConfig(), ENGINE, NO_GRAPHS)
    assert num_blocks == expected // 64
    configured = CacheConfig(capacity_tokens=10**7)
    assert choose_num_blocks(model, TorchKernels(), shape, configured, ENGINE, NO_GRAPHS) == 10**7 // 64


def test_device_memory_is_used_up_to_the_configured_share(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    events = []
    monkeypatch.setattr(pool_size, "run_largest_step", lambda *_: events.append("step"))

    def get_memory() -> tuple[int, int]:
        events.append("memory")
        free_bytes, total_bytes = 6 * GIB, 8 * GIB
        return free_bytes, total_bytes

    class Graphs:
        def __init__(self) -> None:
            events.append("captured")

        def __del__(self) -> None:
            events.append("deleted")

    def capture(storage: KVStorage, max_sequence_tokens: int, *, only_largest: bool) -> Graphs:
        assert only_largest
        return Graphs()

    capturer: Any = SimpleNamespace(capture=capture)
    cache = CacheConfig(memory_share=0.5)
    num_blocks = choose_num_blocks(model, TorchKernels(), model.kv_shape, cache, ENGINE, capturer, get_memory)
    assert events == ["captured", "step", "memory", "deleted"], "memory that graphs and a step take is not free"
    # Half of 8 GiB, of which 2 GiB are in use.
    assert num_blocks == 2 * GIB // (64 * model.kv_shape.token_bytes)


def test_the_memory_of_the_largest_step_is_held_after_the_capture(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(pool_size, "run_largest_step", lambda *arguments: calls.append(arguments))
    storage, kernels = one_block(model), TorchKernels()
    reserve_step_memory(model, kernels, storage, ENGINE)
    assert calls == [(model, kernels, storage, ENGINE)]

    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pool_size, "run_largest_step", run_out)
    reserve_step_memory(model, kernels, storage, ENGINE)
    assert caplog.messages == ["no memory is left for a step of 24 tokens: long prompts are computed in smaller steps"]


def test_a_quantized_pool_has_more_blocks(model: Model) -> None:
    int8 = model.kv_shape.stored_as("int8")
    num_blocks, num_int8_blocks = (
        choose_num_blocks(model, TorchKernels(), shape, CacheConfig(), ENGINE, NO_GRAPHS, lambda: (GIB, GIB))
        for shape in (model.kv_shape, int8)
    )
    assert num_int8_blocks / num_blocks == pytest.approx(model.kv_shape.token_bytes / int8.token_bytes, rel=1e-3)


def test_without_room_for_a_block_the_service_does_not_start(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"cache\.memory_share: expected .* got 0\.9, which leaves 0"):
        choose(model, (GIB // 10, GIB))


def test_without_memory_for_the_largest_step_the_service_does_not_start(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(pool_size, "run_largest_step", run_out)
    with pytest.raises(ConfigError, match=r"engine\.max_step_tokens: expected steps that cpu has memory for .* got 24"):
        choose(model, (GIB, GIB))


def test_without_memory_for_the_check_of_the_model_the_service_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("radixkv.startup.build_engine.check_model", run_out)
    with pytest.raises(ConfigError, match=r"model\.path: expected a model that leaves cpu memory for a short prompt"):
        build_engine(Config.load(None, ["model.device=cpu"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["ceiling_tokens=63"], "expected room for at least 1 whole blocks of 64 tokens, got 63"),
        (["floor_tokens=100", "ceiling_tokens=100"], "expected room for at least 2 whole blocks of 64 tokens, got 100"),
    ],
)
def test_ceilings_must_hold_a_block_and_the_floor(settings: list[str], message: str) -> None:
    config = Config.load(None, ["model.device=cpu", *(f"tenants.acme.{setting}" for setting in settings)])
    with pytest.raises(ConfigError, match=rf"tenants\.acme\.ceiling_tokens: {message}"):
        build_engine(config)


def test_floors_must_fit_into_the_pool() -> None:
    settings = ["model.device=cpu", "tenants.acme.floor_tokens=131000", "tenants.other.floor_tokens=100"]
    with pytest.raises(ConfigError, match=r"tenants\.\*\.floor_tokens: .* pool's 2048 blocks in all, got 2049"):
        build_engine(Config.load(None, settings))


def test_graphs_are_checked_before_they_serve(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[object, ...]] = []
    graphs: Any = SimpleNamespace(shapes=["one"])
    capturer: Any = SimpleNamespace(capture=lambda storage, max_sequence_tokens: graphs)
    monkeypatch.setattr("radixkv.startup.build_engine.drop_wrong_graphs", lambda *arguments: checked.append(arguments))
    storage, kernels = one_block(model), TorchKernels()
    runner = make_runner(model, storage, kernels, capturer)
    assert [arguments[:5] for arguments in checked] == [(graphs, model, storage, kernels, 16)]
    assert runner.has_graphs
    assert not runner.without_graphs().has_graphs


class TestAvailableBytes:
    """Available main memory, read from fake files in place of /proc and /sys."""

    @staticmethod
    def write(root: Path, limit: str | None) -> Path:
        """Write files that state 3,000 KiB available, and perhaps a limit of a cgroup that uses 1,000,000 bytes."""
        (root / "proc").mkdir()
        (root / "proc/meminfo").write_text("MemTotal:  4000 kB\nMemAvailable:  3000 kB\nHugePages_Total:  0\n")
        if limit is not None:
            (root / "sys/fs/cgroup").mkdir(parents=True)
            (root / "sys/fs/cgroup/memory.max").write_text(limit)
            (root / "sys/fs/cgroup/memory.stat").write_text("anon 1000000\nfile 500000\n")
        return root

    @pytest.mark.parametrize(
        ("limit", "expected"),
        [(None, 3_072_000), ("max\n", 3_072_000), ("1500000\n", 500_000), ("9000000\n", 3_072_000)],
        ids=["no group", "no limit", "a limit", "a limit beyond the machine"],
    )
    def test_the_tightest_bound_applies(self, tmp_path: Path, limit: str | None, expected: int) -> None:
        assert available_bytes(self.write(tmp_path, limit)) == expected

    @pytest.mark.parametrize(
        ("cgroup", "files", "expected"),
        [
            (
                "0::/system.slice/radixkv.service\n",
                {
                    "system.slice/radixkv.service/memory.max": "max\n",
                    "system.slice/radixkv.service/memory.stat": "anon 100000\n",
                    "system.slice/memory.max": "1200000\n",
                    "system.slice/memory.stat": "anon 400000\n",
                },
                800_000,
            ),
            (
                "3:memory:/docker/x\n",
                {
                    "memory/docker/x/memory.limit_in_bytes": "2000000\n",
                    "memory/docker/x/memory.stat": "rss 200\ntotal_rss 300000\n",
                },
                1_700_000,
            ),
        ],
        ids=["the slice of a systemd unit", "version 1"],
    )
    def test_the_cgroups_of_the_process_are_bounds(
        self, tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
    ) -> None:
        root = self.write(tmp_path, None)
        (root / "proc/self").mkdir()
        (root / "proc/self/cgroup").write_text(cgroup)
        for name, text in files.items():
            path = root / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert available_bytes(root) == expected

    def test_without_system_files_no_bound_is_known(self, tmp_path: Path) -> None:
        assert available_bytes(tmp_path) is None


@pytest.mark.parametrize(("available", "num_warnings"), [(10, 1), (2**60, 0), (None, 0)])
def test_a_pool_beyond_the_memory_gets_a_warning(
    available: int | None, num_warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_engine_module, "available_bytes", lambda: available)
    build_engine(Config.load(None, ["model.device=cpu", "cache.capacity_tokens=1024"]))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == num_warnings
    assert all("only 0.0 MB of memory are available" in warning for warning in warnings)


def test_adapters_have_memory_of_their_own(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = (8 * GIB, 10 * GIB)
    num_blocks_without_adapters = choose(model, memory, block_size=16)
    monkeypatch.setattr(model, "adapted", SimpleNamespace(adapters=SimpleNamespace(max_bytes=GIB)))
    num_blocks = choose(model, memory, block_size=16)
    block_bytes = 16 * model.kv_shape.token_bytes
    assert num_blocks_without_adapters - num_blocks == GIB // block_bytes
