"""The KV connector of vLLM, called as vLLM calls it. Where vLLM is not installed, stand-ins replace its base classes.

The K/V of a token are a digest of the tokens up to it, so wrong contents of a block are noticed. `bench/vllm_tier.py`
runs the connector in vLLM itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from radixkv.errors import ConfigError, UnsupportedModel
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server
from tests.patience import PATIENCE_S, wait_until

HAS_VLLM = importlib.util.find_spec("vllm") is not None
BLOCK_TOKENS = 4
NUM_BLOCKS = 24
LAYER_NAMES = ("layers.0", "layers.1")


def stand_ins() -> dict[str, ModuleType]:
    """Return modules with the names of vLLM that the connector imports."""

    class KVConnectorBase_V1:  # noqa: N801 - vLLM's name
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self._connector_metadata: Any = None

        def bind_connector_metadata(self, metadata: Any) -> None:
            self._connector_metadata = metadata

        def _get_connector_metadata(self) -> Any:
            return self._connector_metadata

    class KVConnectorRole(Enum):
        SCHEDULER = 0
        WORKER = 1

    @dataclass
    class KVConnectorStats:
        data: dict[str, Any]

    @dataclass
    class FullAttentionSpec:
        block_size: int

    empty_classes = ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata")
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.distributed": {},
        "vllm.distributed.kv_transfer": {},
        "vllm.distributed.kv_transfer.kv_connector": {},
        "vllm.distributed.kv_transfer.kv_connector.v1": {},
        "vllm.distributed.kv_transfer.kv_connector.v1.base": {
            "KVConnectorBase_V1": KVConnectorBase_V1,
            "KVConnectorRole": KVConnectorRole,
            **{name: type(name, (), {}) for name in empty_classes},
        },
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {"KVConnectorStats": KVConnectorStats},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"FullAttentionSpec": FullAttentionSpec},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, stand_in in modules.items():
        vars(stand_in).update(contents[name])
    return modules


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """Return the module of the connector."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_VLLM:
            for name, stand_in in stand_ins().items():
                patch.setitem(sys.modules, name, stand_in)
        name = "radixkv.integrations.tiers.vllm_connector"
        patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(name)
        sys.modules.pop(name, None)


def config_of(options: dict[str, Any], rank: int = 0, num_ranks: int = 1, policy: str = "recompute") -> Any:
    """Return the parts of vLLM's configuration that the connector reads; `policy` is for failed loads."""
    parallel = SimpleNamespace(
        rank=rank,
        world_size=num_ranks,
        data_parallel_rank=0,
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"model_id": "weights", "load_limit_s": PATIENCE_S, **options},
            is_kv_producer=True,
        ),
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(
            model="model",
            revision=None,
            seed=0,
            dtype=torch.float32,
            hf_config=SimpleNamespace(to_dict=dict),
            compute_hash=lambda: "hash",
        ),
    )


def kv_cache_config_of(module: Any, spec: Any = None) -> Any:
    """Return vLLM's description of `NUM_BLOCKS` blocks of one group of layers, of full attention without a spec."""
    if spec is None and HAS_VLLM:
        spec = module.FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=2, dtype=torch.float32)
    elif spec is None:
        spec = module.FullAttentionSpec(BLOCK_TOKENS)
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


def request_of(request_id: str, tokens: list[int], **fields: Any) -> Any:
    """Return the parts of vLLM's request that the connector reads."""
    defaults = {
        "request_id": request_id,
        "all_token_ids": tokens,
        "num_tokens": len(tokens),
        "num_computed_tokens": 0,
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "resumable": False,
        "kv_transfer_params": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**{**defaults, **fields})


def kv_of(tokens: list[int], end: int, layer: str, rank: int) -> list[float]:
    """Return the K and V of a rank's layer for the token before `end`, each a number that depends on all tokens."""
    return [float(crc32(repr((tokens[:end], layer, rank, index)).encode())) for index in range(2)]


class Engine:
    """Calls the connectors as vLLM does: one in the scheduler, one per rank. The engine itself caches no prefixes."""

    def __init__(self, module: Any, options: dict[str, Any], num_ranks: int = 1) -> None:
        connector_class = module.RadixKVConnector
        roles = module.KVConnectorRole
        self.scheduler = connector_class(
            config_of(options, 0, num_ranks), roles.SCHEDULER, kv_cache_config=kv_cache_config_of(module)
        )
        self.workers = [
            connector_class(
                config_of(options, rank, num_ranks), roles.WORKER, kv_cache_config=kv_cache_config_of(module)
            )
            for rank in range(num_ranks)
        ]
        self.kv = [{name: torch.zeros(NUM_BLOCKS, 1, BLOCK_TOKENS, 2) for name in LAYER_NAMES} for _ in self.workers]
        for worker, kv in zip(self.workers, self.kv, strict=True):
            worker.register_kv_caches(kv)
        self.scheduler.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self._free = list(range(1, NUM_BLOCKS))
        self._num_requests = 0
        self._ended_loads: list[set[str]] = []  # request ids, for each step and worker

    def run(self, tokens: list[int], random: Random, **fields: Any) -> int:
        """Run one request in chunks of random sizes. Verifies all loaded tokens, and returns their number."""
        self._num_requests += 1
        request = request_of(f"request {self._num_requests}", tokens, **fields)
        random.shuffle(self._free)
        num_blocks = -(-len(tokens) // BLOCK_TOKENS)
        ids, self._free = self._free[:num_blocks], self._free[num_blocks:]
        while (answer := self.scheduler.get_num_new_matched_tokens(request, 0))[0] is None:
            self.step(request, ids, 0)
        num_matched, is_async = answer
        assert is_async is bool(num_matched)
        assert num_matched < len(tokens)
        assert not num_matched % BLOCK_TOKENS
        self.scheduler.update_state_after_alloc(
            request, SimpleNamespace(get_block_ids=lambda: (list(ids),)), num_matched
        )
        num_loaded = self.load(request, ids, num_matched) if num_matched else 0
        if num_loaded < num_matched:  # vLLM asks again; the connector must not try again, which could fail forever
            assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        request.num_computed_tokens = num_loaded
        self.verify(tokens, ids, num_loaded)
        while request.num_computed_tokens < len(tokens):
            num_tokens = min(random.randint(1, 9), len(tokens) - request.num_computed_tokens)
            self.step(request, ids, num_tokens)
            request.num_computed_tokens += num_tokens
        self.scheduler.request_finished(request, ids)
        self._free += ids
        return num_loaded

    def load(self, request: Any, ids: list[int], num_matched: int) -> int:
        """Run steps until all workers have loaded. Returns the number of tokens before the first failed block."""
        loading_ranks = set(range(len(self.workers)))
        failed_blocks: set[int] = set()

        def step_ended_all_loads() -> bool:
            for rank, (ended, failed) in enumerate(self.step(request, ids, 0)):
                assert ended <= {request.request_id}
                if ended:
                    loading_ranks.discard(rank)
                failed_blocks.update(failed)
            return not loading_ranks

        wait_until(step_ended_all_loads)
        num_loaded_blocks = 0
        for block_id in ids[: num_matched // BLOCK_TOKENS]:
            if block_id in failed_blocks:
                break
            num_loaded_blocks += 1
        return BLOCK_TOKENS * num_loaded_blocks

    def step(self, request: Any, ids: list[int], num_tokens: int) -> list[tuple[set[str], set[int]]]:
        """Run a step that computes tokens of a request. Returns, for each worker, ended loads and failed blocks."""
        scheduled = {request.request_id: num_tokens} if num_tokens else {}
        block_state = SimpleNamespace(resolve_block_ids=lambda request_id: (list(ids),))
        metadata = self.scheduler.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=block_state)
        )
        results: list[tuple[set[str], set[int]]] = []
        reports = []
        for rank, (worker, kv) in enumerate(zip(self.workers, self.kv, strict=True)):
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            for position in range(request.num_computed_tokens, request.num_computed_tokens + num_tokens):
                for name in LAYER_NAMES:
                    worker.wait_for_layer_load(name)
                    slot = (ids[position // BLOCK_TOKENS], 0, position % BLOCK_TOKENS)
                    kv[name][slot] = torch.tensor(kv_of(request.all_token_ids, position + 1, name, rank))
                    worker.save_kv_layer(name, kv[name], None)
            worker.wait_for_save()
            results.append((worker.get_finished(set())[1], worker.get_block_ids_with_load_errors()))
            if (report := worker.build_connector_worker_meta()) is not None:
                reports.append(report)
        joined_report = reports[0] if reports else None
        for report in reports[1:]:
            joined_report = joined_report.aggregate(report)
        self._ended_loads += [ended for ended, _ in results]
        # vLLM reports a load when all workers have ended it, and a failed block as soon as one worker reports it.
        num_ended = Counter(request_id for ended in self._ended_loads for request_id in ended)
        ended_everywhere = {request_id for request_id, count in num_ended.items() if count >= len(self.workers)}
        self.scheduler.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=joined_report,
                invalid_block_ids=set().union(*(failed for _, failed in results)),
                finished_recving=ended_everywhere,
            )
        )
        return results

    def verify(self, tokens: list[int], ids: list[int], num_tokens: int) -> None:
        for rank, kv in enumerate(self.kv):
            for position in range(num_tokens):
                for name in LAYER_NAMES:
                    loaded = kv[name][ids[position // BLOCK_TOKENS], 0, position % BLOCK_TOKENS]
                    assert torch.equal(loaded, torch.tensor(kv_of(tokens, position + 1, name, rank)))

    def settle(self) -> None:
        """Wait until everything is stored, and report it to the scheduler."""
        for worker in self.workers:
            assert worker._worker._store.wait_for_writes(PATIENCE_S)
        self.step(request_of("idle", []), [], 0)

    def close(self) -> None:
        for each in (*self.workers, self.scheduler):
            each.shutdown()


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    tmp_path.chmod(0o700)
    return {"disk_path": str(tmp_path / "tiers"), "disk_bytes": 1 << 20}


PROMPT = list(range(100, 118))  # four and a half blocks, of which the four full ones can be loaded: 16 tokens


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_prefixes_are_found_after_a_restart(module: Any, disk: dict[str, Any], num_ranks: int) -> None:
    random = Random(0)
    engine = Engine(module, disk, num_ranks)
    assert engine.run(PROMPT, random) == 0
    engine.settle()
    assert engine.run(PROMPT, random) == 16
    engine.close()
    engine = Engine(module, disk, num_ranks)
    assert engine.run([*PROMPT[:9], 1, 2, 3, 4, 5], random) == 8  # two full blocks begin like `PROMPT`
    assert engine.run(PROMPT[:16], random) == 12  # at least one token is computed
    assert engine.run([1, *PROMPT], random) == 0
    engine.close()


def third_block(module: Any, engine: Engine) -> Any:
    """Return the identity of the third block of `PROMPT` in the tiers of an engine."""
    return engine.scheduler._scheduler._blocks(module._Prompt(request_of("other", PROMPT)), 3)[2]


def test_a_block_is_usable_only_if_all_ranks_have_it(module: Any, disk: dict[str, Any]) -> None:
    engine = Engine(module, disk, 2)
    engine.run(PROMPT, Random(0))
    engine.settle()
    engine.workers[1]._worker._store.delete([module.key_of_rank(third_block(module, engine).key, 1)])
    engine.settle()
    assert engine.run(PROMPT, Random(0)) == 8
    engine.close()


def test_tenants_and_salts_share_nothing(module: Any, disk: dict[str, Any]) -> None:
    engine = Engine(module, disk)
    random = Random(0)
    for fields in ({}, {"cache_salt": "salt"}, {"kv_transfer_params": {"tenant": "alice"}}):
        assert engine.run(PROMPT, random, **fields) == 0
        engine.settle()
        assert engine.run(PROMPT, random, **fields) == 16
    engine.close()


@pytest.mark.parametrize(
    "fields",
    [{"mm_features": [object()]}, {"lora_request": object()}, {"prompt_embeds": object()}, {"resumable": True}],
)
def test_requests_whose_kv_depend_on_more_than_tokens_use_no_tier(
    module: Any, disk: dict[str, Any], fields: dict[str, Any]
) -> None:
    engine = Engine(module, disk)
    for _ in range(2):
        assert engine.run(PROMPT, Random(0), **fields) == 0
        engine.settle()
    assert engine.run(PROMPT, Random(0)) == 0
    engine.close()


def test_empty_steps_wait_for_a_load(module: Any, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(module, disk)
    engine.run(PROMPT, Random(0))
    engine.settle()
    monkeypatch.setattr(module, "_IDLE_WAIT_S", PATIENCE_S)
    step_tokens: list[int] = []
    step = engine.step

    def recorded_step(request: Any, ids: list[int], num_tokens: int) -> Any:
        step_tokens.append(num_tokens)
        return step(request, ids, num_tokens)

    monkeypatch.setattr(engine, "step", recorded_step)
    assert engine.run(PROMPT, Random(0)) == 16
    assert step_tokens.count(0) == 1
    engine.close()


def test_without_memory_for_copies_nothing_fails(
    module: Any, disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> Any:
        raise MemoryError("no memory is left")

    engine = Engine(module, disk)
    with monkeypatch.context() as patch:
        patch.setattr(module.KVLayers, "read", no_memory)
        assert engine.run(PROMPT, Random(0)) == 0
    engine.run(PROMPT, Random(0))
    engine.settle()
    with monkeypatch.context() as patch:
        patch.setattr(module.np, "empty", no_memory)
        assert engine.run(PROMPT, Random(0)) == 0
    engine.close()


def test_blocks_stored_before_a_reset_are_not_loaded_after_it(module: Any, disk: dict[str, Any]) -> None:
    engine = Engine(module, disk)
    engine.run(PROMPT, Random(0))
    engine.settle()
    assert engine.scheduler.reset_cache()
    assert engine.run(PROMPT, Random(0)) == 0
    engine.settle()
    assert engine.run(PROMPT, Random(0)) == 16
    engine.close()
    engine = Engine(
        module, disk
    )  # a new process has the weights of the checkpoint again, which the reset may have replaced
    assert engine.run(PROMPT, Random(0)) == 16
    engine.close()


def test_vllm_can_log_what_the_tiers_count(module: Any, disk: dict[str, Any]) -> None:
    engine = Engine(module, disk)
    worker = engine.workers[0]
    engine.run(PROMPT, Random(0))
    engine.settle()
    assert worker.get_kv_connector_stats().reduce() == {"saved": 4}
    assert worker.get_kv_connector_stats() is None
    engine.run(PROMPT, Random(0))
    stats = worker.get_kv_connector_stats()
    same_stats = module.RadixKVConnector.build_kv_connector_stats(stats.data)
    assert same_stats.aggregate(stats).reduce() == {"loaded": 2 * 4}
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()
    engine.close()


def test_another_model_finds_nothing(module: Any, disk: dict[str, Any]) -> None:
    engine = Engine(module, disk)
    engine.run(PROMPT, Random(0))
    engine.close()
    engine = Engine(module, {**disk, "model_id": "other weights"})
    assert engine.run(PROMPT, Random(0)) == 0
    engine.close()


def test_a_block_that_cannot_be_loaded_is_computed_and_saved_again(module: Any, disk: dict[str, Any]) -> None:
    engine = Engine(module, disk)
    engine.run(PROMPT, Random(0))
    engine.settle()
    with next(Path(disk["disk_path"]).glob("*/blocks")).open("r+b") as file:
        file.seek(2 * 4096)  # the third block
        file.write(b"x")
    assert engine.run(PROMPT, Random(0)) == 8
    engine.settle()
    assert engine.run(PROMPT, Random(0)) == 16
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_prompts_load_only_their_own_kv(module: Any, disk: dict[str, Any], seed: int) -> None:
    """The disk is too small for all prompts, engines restart, and files are modified. `Engine.run` verifies all K/V."""
    random = Random(seed)
    prompts = [[random.randrange(3) for _ in range(random.randint(1, 30))] for _ in range(12)]
    num_loaded = 0
    for _ in range(4):
        engine = Engine(module, {**disk, "disk_bytes": 30 * 8192}, 2)
        for _ in range(12):
            prompt = random.choice(prompts) + [random.randrange(3) for _ in range(random.randint(1, 10))]
            num_loaded += engine.run(prompt, random, cache_salt=random.choice([None, "salt"]))
            if random.random() < 0.3:
                engine.settle()
        engine.close()
        for path in Path(disk["disk_path"]).glob("*/blocks"):
            content = np.fromfile(path, np.uint8)
            content[random.randrange(len(content))] ^= 1
            content.tofile(path)
    assert num_loaded


@pytest.mark.skipif(SERVER is None, reason=WHY_NOT)
def test_engines_share_redis(module: Any, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        options = {"redis_url": server.url, "trusted": True}
        first, second = Engine(module, options, 2), Engine(module, options, 2)
        assert first.run(PROMPT, Random(0)) == 0
        first.settle()
        assert second.run(PROMPT, Random(0)) == 16
        key, store = module.key_of_rank(third_block(module, first).key, 1), first.workers[1]._worker._store
        store.delete([key])
        wait_until(lambda: store.exists([key]).result(PATIENCE_S) == [False])
        third = Engine(module, options, 2)
        assert third.run(PROMPT, Random(0)) == 8  # rank 1 does not have its part of the third block
        assert "redis_absent" not in third.workers[1]._worker._store.counts(), "no load of the missing part was tried"
        third.close()
        server.stop()
        assert second.run([7, *PROMPT], Random(0)) == 0
        first.close()
        second.close()


def test_a_policy_that_fails_requests_is_refused(module: Any, disk: dict[str, Any]) -> None:
    config = config_of(disk, policy="fail")
    with pytest.raises(ConfigError, match="kv_load_failure_policy: expected recompute"):
        module.RadixKVConnector(config, module.KVConnectorRole.WORKER, kv_cache_config=kv_cache_config_of(module))


def test_models_with_other_states_are_refused(module: Any, disk: dict[str, Any]) -> None:
    class MambaSpec:
        pass

    with pytest.raises(UnsupportedModel, match="MambaSpec"):
        module.RadixKVConnector(
            config_of(disk), module.KVConnectorRole.WORKER, kv_cache_config=kv_cache_config_of(module, MambaSpec())
        )


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install() -> None:
    command = [sys.executable, "-c", "import radixkv.integrations.tiers.vllm_connector"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "pip install vllm" in result.stderr


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_connector_implements_what_vllm_requires(module: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    assert issubclass(module.RadixKVConnector, KVConnectorBase_V1)
    assert not module.RadixKVConnector.__abstractmethods__
