"""An engine core over a small real model, run step by step, with generations that keep only some of their K/V."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from radixkv.api.caller import Caller
from radixkv.api.compression import Compression
from radixkv.api.params import PrefillParams
from radixkv.api.result import GenerationFuture, PrefillResult
from radixkv.api.sampling import Sampling
from radixkv.cache.block_pool import BlockState
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.tenants import Quota
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig, ModelConfig
from radixkv.engine.core import EngineCore
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Request
from radixkv.storage.device_pool import KVStorage
from tests.model.exact.checkpoints import VOCAB_SIZE

BLOCK_SIZE = 4


def load(directory: Path, **options: object) -> Model:
    return load_model(ModelConfig(path=str(directory), device="cpu", **options))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids. Prompts of one seed begin alike."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


class CompressedBench:
    """An engine core over a real model. Each step is followed by a check of the cache.

    The clock advances by a second whenever it is read.
    """

    def __init__(
        self,
        model: Model,
        num_blocks: int = 128,
        kv_dtype: str = "auto",
        quotas: dict[str, Quota] | None = None,
        **config: object,
    ) -> None:
        self.cache = PrefixCache(num_blocks, BLOCK_SIZE, quotas=quotas)
        storage = KVStorage(num_blocks, BLOCK_SIZE, model.kv_shape.stored_as(kv_dtype), model.device, is_by_layer=True)
        storage.pool.blocks.fill_(0xFF)  # NaN, so that reading a slot that was never written is noticed
        self.runner = Runner(model, storage, TorchKernels())
        ticks = itertools.count()
        self.core = EngineCore.build(self.runner, self.cache, EngineConfig(**config), clock=lambda: float(next(ticks)))

    def generate(
        self,
        ids: list[int],
        max_new_tokens: int,
        compression: Compression | None = None,
        tenant: str = "",
        **params: object,
    ) -> GenerationFuture:
        """Submit a generation. Log probabilities of streamed tokens are added to `streamed_logprobs` of its future."""
        sampling = Sampling(max_new_tokens, ignore_eos=True, seed=0, logprobs=3, compression=compression)
        future = GenerationFuture()
        streamed = future.streamed_logprobs = []  # type: ignore[attr-defined]
        generation = Generation(sampling, frozenset(), lambda chunk: streamed.extend(chunk.logprobs))
        self.core.submit(self._request(ids, tenant, future, generation, params))
        return future

    def prefill(self, ids: list[int], **params: object) -> PrefillResult:
        """Run a prefill that returns its logits, and all requests that are still unfinished."""
        future: Future[PrefillResult] = Future()
        self.core.submit(self._request(ids, "", future, None, {"return_logits": True, **params}))
        self.run()
        return future.result(0)

    def _request(
        self,
        ids: list[int],
        tenant: str,
        future: Future[PrefillResult] | GenerationFuture,
        generation: Generation | None,
        params: dict[str, object],
    ) -> Request:
        packed = np.asarray(ids, dtype="<u4").tobytes()
        prompt_params = PrefillParams(packed, Caller(tenant), **params)
        return Request(prompt_params, Namespace("model", tenant), future, 0.0, generation)

    def step(self) -> None:
        self.core.step()
        self.cache.check()

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    @property
    def num_leased_blocks(self) -> int:
        return self.cache.pool.num_leased + self.cache.num_pinned_blocks


def overwrite_free_blocks(bench: CompressedBench) -> None:
    """Overwrite all free blocks with the byte 0xFF, so that reading one makes the results NaN."""
    is_free = np.frombuffer(bench.cache.pool.states(), dtype=np.uint8) == BlockState.FREE
    bench.runner.storage.pool.blocks[torch.from_numpy(np.flatnonzero(is_free))] = 0xFF
