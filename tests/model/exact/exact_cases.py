"""Random cases that check whether a cache hit changes a single bit of the answer.

    python -m tests.model.exact.exact_cases --cases 10000 --dtype float32 --kv-dtype int8
    OMP_NUM_THREADS=1 python -m tests.model.exact.exact_cases --cases 18000 --tiers host --leaving-share 1 --jobs 2

Each case computes a prompt twice: alone and without the cache, and then with a part of it cached, in chunks of another
size, with other requests in the batch, after evictions. Logits and the K/V of all tokens are compared bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma4TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    MixtralConfig,
    PretrainedConfig,
)

from bench.parts.environment import describe_run
from bench.parts.result_file import write_json
from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.result import GenerateResult, PrefillResult
from radixkv.api.sampling import Sampling
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.recurrent_states import StateSlots
from radixkv.cache.window_pool import NO_PART, Reach, min_parts
from radixkv.compute.graphs.capturer import GraphCapturer
from radixkv.config import KV_DTYPES, EngineConfig, ModelConfig
from radixkv.engine.core import EngineCore
from radixkv.errors import OutOfBlocks
from radixkv.invocation import InvocationMarks
from radixkv.kernels.kv_pool import KVPool
from radixkv.model.loading import load_model
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Request
from radixkv.startup.attention_choice import choose_attention_kernels
from radixkv.startup.attention_trial import try_attention_here
from radixkv.startup.build_engine import make_runner
from radixkv.startup.tiers import open_stores
from radixkv.startup.windowed_layers import windows_of
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.layer_groups import LayerGroups
from tests.model.exact.checkpoints import CONFIGS, SHAPE, VOCAB_SIZE, write_checkpoint
from tests.model.exact.random_adapters import random_adapter
from tests.model.exact.stores import STORES, Places, open_places
from tests.offload.always_load import AlwaysLoad

_LATENT = {
    **SHAPE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 3,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "eos_token_id": 1,
}
MODELS: dict[str, PretrainedConfig] = {
    **CONFIGS,
    "deepseek_v2": DeepseekV2Config(**_LATENT | {"q_lora_rank": None, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": DeepseekV3Config(**_LATENT),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "gpt2": GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=1024, initializer_range=0.2),
    "lfm2": Lfm2Config(
        **SHAPE | {"num_hidden_layers": 4},
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        pad_token_id=0,
        eos_token_id=1,
    ),
    "gpt_oss": GptOssConfig(
        **SHAPE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        pad_token_id=0,
        eos_token_id=1,
    ),
    "gemma4_text": Gemma4TextConfig(  # K/V of another shape in the layer without a window
        **SHAPE,
        head_dim=16,
        per_layer_config={"2": {"head_dim": 32, "num_key_value_heads": 1}},
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=24,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        pad_token_id=0,
        eos_token_id=1,
    ),
}
# The warp-specialized attention of a GPU needs blocks of 64 tokens, and a head dim above 32.
GPU_BLOCK_SIZE = 64
GPU_HEAD_DIMS = (64, 128)
WITHOUT_TIERS = ("lfm2",)  # its states are not stored, so the service refuses it
ON_CPU_ONLY = (
    "deepseek_v2",
    "deepseek_v3",
    "lfm2",
    "gemma4_text",
)  # there are no GPU kernels for their latents, states, or K/V of two shapes yet
NUM_BLOCKS = 240
HOST_BLOCKS = 40
MAX_RUNNING = 8
_STORE_PATIENCE_S = 60.0
MAX_TOKENS = 900  # more than the first unit of 512 keys, see `kernels/cpu/attention_plan.py`
USUAL_TOKENS = 420  # more than the first part of 256 keys
MAX_STEP_TOKENS = 1000
LEAVING_SHARE = 0.3


@dataclass(frozen=True)
class Answer:
    """The parts of an answer that must not depend on the cache."""

    result: PrefillResult
    kv: torch.Tensor  # bytes [num_tokens, num_layers, n], scales included
    blocks: npt.NDArray[np.int32]

    def difference(self, other: Answer) -> str:
        """Return where two answers differ first; empty if they are equal."""
        differs = (self.kv != other.kv).any(-1)  # [num_tokens, num_layers]
        if differs.any():
            token, layer = differs.nonzero()[0].tolist()
            return f"K/V of token {token} in layer {layer}"
        assert self.result.logits is not None
        assert other.result.logits is not None
        if not np.array_equal(self.result.logits, other.result.logits):
            return f"logit {int(np.flatnonzero(self.result.logits != other.result.logits)[0])}"
        return ""


class Cases:
    """Cases of one model. Counts the events of its cases.

    Args:
        directory: a checkpoint.
        dtype, exactness, device, weights: see `ModelConfig`.
        kv_dtype: see `CacheConfig`.
        seed: seed of all random choices.
        num_adapters: adapters that requests may use. The device has room for all but one.
        places: the locations of stores for evicted blocks; host memory has room for some of these blocks.
        is_divided: whether windowed layers have a pool of their own, with parts for little more than a step.
        leaving_share: the share of cases before which all cached blocks are evicted to the stores.
        has_gpu_shapes: whether blocks have the size that the attention kernels of a GPU are made for.
        usual_tokens: maximum tokens of most prompts, at least 60. Some prompts are longer if it is the default.
    """

    def __init__(
        self,
        directory: Path,
        dtype: str,
        kv_dtype: str,
        exactness: str,
        seed: int,
        device: str = "cpu",
        weights: str = "auto",
        num_adapters: int = 0,
        places: Places | None = None,
        is_divided: bool = False,
        leaving_share: float = LEAVING_SHARE,
        has_gpu_shapes: bool = False,
        usual_tokens: int = USUAL_TOKENS,
    ) -> None:
        self.leaving_share = leaving_share
        self.usual_tokens = usual_tokens
        self.random = random.Random(seed)
        self.block_size = GPU_BLOCK_SIZE if has_gpu_shapes else self.random.choice((16, 32))
        config = ModelConfig(
            path=str(directory), dtype=dtype, exactness=exactness, device=device, weights=weights,
            max_adapters=num_adapters,
        )  # fmt: skip
        self.model = load_model(config)
        self.adapters = [""] + [self._load_adapter(number) for number in range(num_adapters)]
        if self.model.adapted is not None:
            adapters = self.model.adapted.adapters
            adapters.max_bytes = sum(adapters._sizes.values()) - 1
        kv_shape = self.model.kv_shape.stored_as(kv_dtype)
        kernels = choose_attention_kernels(self.model, kv_shape, self.block_size, try_attention_here)
        is_by_layer = kernels.prefers_layer_major_pool and self.random.random() < 0.8
        groups, num_parts = None, 0
        if is_divided:
            groups = LayerGroups.of(self.model.windows, self.model.max_tokens)
            reach = Reach.of_window(groups.window)
            num_parts = min_parts(reach, self.block_size, MAX_STEP_TOKENS) + 4 * reach.max_parts(
                MAX_TOKENS, self.block_size
            )
        storage = KVStorage(
            NUM_BLOCKS,
            self.block_size,
            kv_shape,
            self.model.device,
            is_by_layer=is_by_layer,
            groups=groups,
            num_parts=num_parts,
        )
        capturer = GraphCapturer(self.model, kernels, EngineConfig())
        states = None
        if self.model.state_shape is not None:  # some cases have too few snapshots
            num_snapshots = self.random.choice((4, 40))
            states = StateSlots(NUM_BLOCKS, self.block_size, MAX_RUNNING, num_snapshots, 4 * self.block_size)
        num_state_slots = 0 if states is None else states.num_slots
        self.runner = make_runner(self.model, storage, kernels, capturer, num_state_slots)
        if self.runner.states is not None:
            self.runner.states.states[:num_state_slots] = float("nan")
        tiers = (places or Places({})).config(HOST_BLOCKS, 4 * NUM_BLOCKS, storage.block_bytes + storage.part_bytes)
        windows = windows_of(storage, MAX_STEP_TOKENS)
        part_of = windows.pools[-1].part_of if windows.pools else None
        stores = open_stores(tiers, self.runner, InvocationMarks(), part_of=part_of)
        for pool in (*storage.pools, *storage.part_pools):
            pool.blocks.fill_(0xFF)  # NaN: reading an unwritten slot changes every sum that it is part of
        listeners = [] if stores is None else [stores.index]
        self.cache = PrefixCache(NUM_BLOCKS, self.block_size, listeners=listeners, windows=windows, state_slots=states)
        self.offload = None if stores is None else stores.connect(self.cache, AlwaysLoad(self.block_size))[0]
        self.stems = [self._fresh(MAX_TOKENS) for _ in range(3)]
        self.counts: Counter[str] = Counter()

    def _load_adapter(self, number: int) -> str:
        """Load a random adapter, the first one for half of the layers only. Returns its digest."""
        assert self.model.adapted is not None
        files = random_adapter(self.model, f"adapter {number}", 3 + 4 * number, number, share=1.0 if number else 0.5)
        self.model.try_adapter(files)
        self.model.adapted.adapters.add(files)
        return files.digest

    def run(self) -> str:
        """Run one case. Returns how the answers differ; empty if they are equal."""
        prompt, adapter = self._prompt(), self._choose_adapter()
        if self.random.random() < 0.3:
            prompt = self._generate_turn(prompt, adapter)
        cold = self._ask([(prompt, "alone", False, adapter)])
        assert cold is not None
        if self.random.random() < 0.2:
            self.cache.evict(self.random.randint(1, 8))
        if self.offload is not None and self.random.random() < self.leaving_share:
            self.cache.evict(NUM_BLOCKS)
            self.offload._saver.flush()
            self.offload._saver.wait(_STORE_PATIENCE_S)
        tenants = self.random.choices(("mine", "others"), k=self.random.randint(0, 3))
        mates = [(self._prompt(), tenant, True, self._choose_adapter()) for tenant in tenants]
        warm = self._ask([*mates, (prompt, "mine", True, adapter)])
        self.counts["cases"] += 1
        self.counts["adapters"] += bool(adapter)
        self.counts["next to other adapters"] += any(mate[-1] != adapter for mate in mates)
        if warm is None:
            self.counts["without room"] += 1
            return ""
        usage = warm.result.usage
        assert cold.result.usage.cached_tokens == 0
        self.counts["hits"] += usage.cached_tokens > 0
        self.counts["partial hits"] += 0 < usage.cached_tokens < usage.prompt_tokens - 1
        self.counts["host hits"] += usage.host_tokens > 0
        self.counts["disk hits"] += usage.disk_tokens > 0
        self.counts["remote hits"] += usage.remote_tokens > 0
        self.counts["hits without all parts"] += self._lacks_a_part(
            warm.blocks[: usage.cached_tokens // self.block_size]
        )
        self.counts["hits inside a block"] += usage.cached_tokens % self.block_size > 0
        self.counts["greedy tokens flipped"] += warm.result.next_token_id != cold.result.next_token_id
        difference = cold.difference(warm)
        self.counts["different"] += bool(difference)
        return f"{difference}: {usage}, {len(mates)} mates" if difference else ""

    def _choose_adapter(self) -> str:
        return self.random.choice(self.adapters) if len(self.adapters) > 1 else ""

    def _generate_turn(self, prompt: list[int], adapter: str) -> list[int]:
        """Generate an answer to a prompt, together with other requests.

        Returns:
            The prompt of the next turn, of which the K/V of the answer were computed by decode steps. The unchanged
            prompt if there was no room.
        """
        count = self.random.choice((2, self.random.randint(2, 40)))
        prompt = prompt[: self.usual_tokens - count - 2]
        core = self._core(self.random.choice((33, 200)))
        mates = [self._prompt()[: self.usual_tokens - 40] for _ in range(self.random.randint(0, 3))]
        adapters = [adapter, *(self._choose_adapter() for _ in mates)]
        futures = [
            self._generate(core, ids, each_adapter, count, "mine")
            for ids, each_adapter in zip((prompt, *mates), adapters, strict=True)
        ]
        self._finish(core, futures)
        if futures[0].exception(0) is not None:
            return prompt  # no room
        self.counts["turns"] += 1
        turn = [*prompt, *futures[0].result(0).token_ids, *self._fresh(self.random.randint(1, 30))]
        return turn[: self.usual_tokens]

    def _core(self, max_step_tokens: int) -> EngineCore:
        config = EngineConfig(max_step_tokens=max_step_tokens, max_running_requests=MAX_RUNNING)
        return EngineCore.build(self.runner, self.cache, config, offload=self.offload)

    def _finish(self, core: EngineCore, futures: Sequence[Future[Any]]) -> None:
        """Run all requests to their ends, also those that wait for stores."""
        while not all(future.done() for future in futures):
            core.step()
            if not core.has_work:
                time.sleep(0.0002)
        self.cache.check()

    def _generate(
        self, core: EngineCore, ids: list[int], adapter: str, count: int, tenant: str
    ) -> Future[GenerateResult]:
        future: Future[GenerateResult] = Future()
        params = PrefillParams(np.array(ids, dtype="<u4").tobytes(), Caller(tenant))
        generation = Generation(Sampling(count, temperature=1.0, seed=1), frozenset(), lambda _: None)
        core.submit(Request(params, Namespace("model", tenant, adapter), future, time.monotonic(), generation))
        return future

    def _ask(self, requests: list[tuple[list[int], str, bool, str]]) -> Answer | None:
        """Run requests together. Returns the last one's answer; None if there was no room for it.

        Args:
            requests: the tokens, the tenant, whether the request reads and writes the cache, and the adapter of each.
        """
        core = self._core(self.random.choice((33, 64, 200, MAX_STEP_TOKENS)))
        futures = [self._submit(core, *request, holds=request is requests[-1]) for request in requests]
        self._finish(core, futures)
        try:
            result = futures[-1].result(0)
        except OutOfBlocks:
            return None
        assert result.held_lease is not None
        blocks = result.held_lease.block_table
        kv = self._stored(torch.from_numpy(blocks).long(), result.usage.prompt_tokens)
        core.held_leases.close()
        return Answer(result, kv, blocks)

    def _lacks_a_part(self, block_ids: npt.NDArray[np.int32]) -> bool:
        """Return whether the part of any of these blocks was released."""
        return any(bool((pool.table[block_ids] == NO_PART).any()) for pool in self.cache.windows.pools)

    def _stored(self, block_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Copy the stored bytes of a sequence, `[num_tokens, num_layers, n]`.

        In windowed layers with a pool of their own, the tokens that the next token does not need are 0.
        """
        storage = self.runner.storage
        full_layers = self._bytes_of(storage.pools, block_ids, num_tokens)
        if not storage.part_pools:
            return full_layers
        (window_pool,) = self.cache.windows.pools
        first_token = window_pool.reach.first_token(num_tokens)
        first_block = first_token // self.block_size
        skipped_tokens = first_block * self.block_size
        part_ids = torch.from_numpy(window_pool.table[block_ids[first_block:].numpy()]).long()
        assert (part_ids >= 0).all(), "the parts that the next token needs are kept"
        kept = self._bytes_of(storage.part_pools, part_ids, num_tokens - skipped_tokens)
        kept[: first_token - skipped_tokens] = 0
        zeros = kept.new_zeros(skipped_tokens, *kept.shape[1:])
        return _side_by_side([torch.cat((zeros, kept)), full_layers])

    def _bytes_of(self, pools: Sequence[KVPool], block_ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
        block_ids, by_pool = block_ids.to(self.model.device), []
        for pool in pools:
            tensors = [pool.values] if pool.scales is None else [pool.values, pool.scales[..., None]]
            by_token = [tensor[block_ids].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:num_tokens] for tensor in tensors]
            by_pool.append(torch.cat([tensor.flatten(2).contiguous().view(torch.uint8) for tensor in by_token], dim=2))
        return _side_by_side(by_pool)

    def _submit(
        self, core: EngineCore, ids: list[int], tenant: str, reads: bool, adapter: str, *, holds: bool
    ) -> Future[PrefillResult]:
        future: Future[PrefillResult] = Future()
        tokens = np.array(ids, dtype="<u4").tobytes()
        params = PrefillParams(
            tokens, Caller(tenant), return_logits=True, hold_lease=holds, read_cache=reads, write_cache=reads
        )
        core.submit(Request(params, Namespace("model", tenant, adapter), future, time.monotonic()))
        return future

    def _prompt(self) -> list[int]:
        """Make a prompt: nearly always the beginning of a stem, then new tokens."""
        stem = self.random.choice(self.stems)
        is_long = self.random.random() < 0.2 and self.usual_tokens == USUAL_TOKENS
        max_tokens = MAX_TOKENS if is_long else self.usual_tokens
        min_shared_tokens = max_tokens // 2 if is_long else 1
        shared = stem[: self.random.randint(min_shared_tokens, max_tokens - 2)]
        own = self._fresh(self.random.choice((2, self.random.randint(1, 60), self.random.randint(3, 200))))
        if self.random.random() < 0.01:
            self.stems[self.random.randrange(len(self.stems))] = self._fresh(MAX_TOKENS)
        return shared + own[: max_tokens - len(shared)]

    def _fresh(self, count: int) -> list[int]:
        return [self.random.randrange(VOCAB_SIZE) for _ in range(count)]


def run_cases(
    model: str,
    dtype: str,
    exactness: str,
    num_cases: int,
    seed: int = 0,
    kv_dtype: str = "auto",
    device: str = "cpu",
    weights: str = "auto",
    num_adapters: int = 0,
    stores: Sequence[str] = (),
    *,
    is_divided: bool = False,
    leaving_share: float = LEAVING_SHARE,
    has_gpu_shapes: bool = False,
    usual_tokens: int = USUAL_TOKENS,
) -> tuple[Counter[str], str]:
    """Run cases of one model. Returns the counted events and the first difference."""
    first_difference = ""
    with tempfile.TemporaryDirectory() as folder, open_places(stores) as places:
        config = MODELS[model]
        if has_gpu_shapes:
            config = with_head_dim(config, random.Random(seed).choice(GPU_HEAD_DIMS))
        checkpoint = write_checkpoint(config, Path(folder))
        cases = Cases(
            checkpoint,
            dtype,
            kv_dtype,
            exactness,
            seed,
            device,
            weights,
            num_adapters,
            places,
            is_divided,
            leaving_share,
            has_gpu_shapes,
            usual_tokens,
        )
        for index in range(num_cases):
            difference = cases.run()
            if difference and not first_difference:
                first_difference = f"{model}, {kv_dtype}, seed {seed}, case {index}: {difference}"
        if cases.offload is not None:
            cases.offload.close()
    return cases.counts, first_difference


def with_head_dim(config: PretrainedConfig, head_dim: int) -> PretrainedConfig:
    """Return a copy of a model's configuration with this head dim."""
    config = copy.deepcopy(config)
    if isinstance(config, GPT2Config):
        config.n_embd = config.n_head * head_dim
    else:
        config.head_dim = head_dim
    return config


def models_for(device: str, tiers: Sequence[str] = ()) -> list[str]:
    """Return the names of the models that the service does not refuse on a device, with these tiers."""
    refused = {*(ON_CPU_ONLY if device == "cuda" else ()), *(WITHOUT_TIERS if tiers else ())}
    return [model for model in MODELS if model not in refused]


def _models(options: argparse.Namespace) -> list[str]:
    return options.models or models_for(options.models_of or options.device, options.tiers)


def _side_by_side(stored: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the layers of pools; layers with fewer bytes per token are padded with zeros."""
    num_bytes = max(each.shape[2] for each in stored)
    return torch.cat([functional.pad(each, (0, num_bytes - each.shape[2])) for each in stored], dim=1)


def _try_model(options: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run a model's cases. Returns a row of results, as benchmarks write them."""
    index, start_s = list(MODELS).index(model), time.perf_counter()
    try:
        counts, difference = run_cases(
            model,
            options.dtype,
            options.exactness,
            -(-options.cases // len(_models(options))),
            100 * options.seed + index,
            options.kv_dtype,
            options.device,
            options.weights,
            options.adapters,
            options.tiers,
            leaving_share=options.leaving_share,
            has_gpu_shapes=(options.models_of or options.device) == "cuda",
            usual_tokens=options.usual_tokens,
        )
    except Exception as raised:  # noqa: BLE001 - the other models are tried
        traceback.print_exc()
        counts, difference = Counter(different=1, cases=1), f"{type(raised).__name__}: {raised}"
    return {
        "model": model,
        "passed": counts["cases"] - counts["different"],
        "failed": counts["different"],
        "seconds": time.perf_counter() - start_s,
        "is_right": options.exactness == "fast" or not counts["different"],
        "first_difference": difference or None,
        "met": dict(counts),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Check whether a cache hit changes a bit of the answer.")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto")
    parser.add_argument("--exactness", choices=("exact", "fast"), default="exact")
    parser.add_argument("--weights", choices=("auto", "q8", "q4", "int8"), default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models-of", choices=("cpu", "cuda"), help="device whose models and shapes are tried")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), help="instead of all of the device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a row for each model, written after each")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a model")
    parser.add_argument("--leaving-share", type=float, default=LEAVING_SHARE, help="see Cases")
    parser.add_argument("--usual-tokens", type=int, default=USUAL_TOKENS, help="see Cases; fewer for more cases")
    parser.add_argument("--tiers", action="append", choices=STORES, default=[], help="may be repeated")
    options = parser.parse_args()
    start_s, counts, first, rows = time.perf_counter(), Counter[str](), "", []
    run = describe_run("tests.model.exact.exact_cases")
    models = _models(options)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for row in pool.map(_try_model, [options] * len(models), models):
            print(f"{row['model']}: {row['met']}", flush=True)
            counts += row["met"]
            first = first or row["first_difference"] or ""
            rows.append(row)
            if options.json:
                write_json(options.json, {"rows": rows, "is_finished": len(rows) == len(models), **run})
    took_s = time.perf_counter() - start_s
    kinds = f"{options.exactness}, {options.dtype}, weights {options.weights}, pool {options.kv_dtype}"
    print(f"{kinds}, {took_s:.0f} s: {dict(counts)}")
    if first:
        print(f"first difference: {first}")
    min_share = 0.8 if options.leaving_share <= LEAVING_SHARE else 0.6  # host memory cannot keep all evicted blocks
    has_reused = counts["partial hits"] >= min_share * counts["cases"]
    return 0 if has_reused and (options.exactness == "fast" or not counts["different"]) else 1


if __name__ == "__main__":
    sys.exit(main())
