"""Traces the kernels that a service launches, from startup to traffic, without a GPU and without compiling.

Triton's own binder makes the key of each launch, by which Triton finds compiled code. The kernels compute nothing, so
the answers are meaningless.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute import runner as runner_module
from radixkv.compute.forward import StepOutputs
from radixkv.compute.graphs.graphs import StepGraphs
from radixkv.compute.runner import Runner, StepResult
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.errors import UnsupportedModel
from radixkv.kernels.gpu.linear import Tiles, linear, try_tiles
from radixkv.model import exactness
from radixkv.model import model as model_module
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.triton_kernels import TritonKernels, candidates
from radixkv.model.exactness_on_gpu import row_functions
from radixkv.model.layers import gpu_layers
from radixkv.model.model import Model
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Request
from radixkv.startup.attention_check import check_attention
from radixkv.startup.first_launches import launch_all
from radixkv.storage.device_pool import KVStorage

VOCAB_SIZE = 512
MAX_TOKENS = 16384
GPU = torch.device("cuda")


class Launches:
    """Records the key of each launch.

    Attributes:
        phase: name of the current phase.
        phases: for each kernel and key, the phases in which it was launched, in order, one per launch.
        count: number of launches.
    """

    def __init__(self) -> None:
        self.phase = "load"
        self.phases: dict[tuple[str, str], list[str]] = {}
        self.count = 0

    def new_in(self, phase: str) -> list[str]:
        """Return the names of kernels, once for each key whose first launch was in this phase."""
        return [name for (name, _), phases in self.phases.items() if phases[0] == phase]

    def only_in(self, phase: str) -> list[str]:
        """Return the names of kernels, once for each key that was launched in this phase only."""
        return [name for (name, _), phases in self.phases.items() if set(phases) == {phase}]

    @contextlib.contextmanager
    def traced(self) -> Iterator[Launches]:
        """Record launches instead of compiling and launching."""
        original_run, keys = JITFunction.run, []

        def record_key(*, key: Any, **_: Any) -> bool:
            keys.append(str(key))
            return True  # so that nothing is compiled

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            keys.clear()
            original_run(function, *args, grid=grid, warmup=True, **kwargs)
            self.phases.setdefault((function.fn.__name__, keys[0]), []).append(self.phase)
            self.count += 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JITFunction, "run", run)
            patch.setattr(knobs.runtime, "jit_cache_hook", record_key)
            triton.runtime.driver.set_active(_NoDevice())
            try:
                yield self
            finally:
                triton.runtime.driver.set_active(None)


class _NoDevice:
    """The part of a Triton driver that the binder needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class TracedService:
    """A service as on a GPU: the layers of the model, the pool and the engine, as `build_engine` makes them.

    Args:
        patch: undone at the end of a test.
        launches: records the launches. The trial of the attention kernels is the phase "trial", the other work "load".
        is_exact: whether it runs in exact mode.
        kv_dtype: see `CacheConfig.kv_dtype`.
        head_dim: numbers in a vector of one head.
        has_graphs: whether short steps are captured as graphs. A replay of a graph launches nothing.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        launches: Launches,
        *,
        is_exact: bool,
        kv_dtype: str,
        head_dim: int = 128,
        has_graphs: bool = False,
    ) -> None:
        _imitate_gpu(patch, is_exact)
        launches.phase = "load"
        model = _build_model(is_exact, head_dim)
        shape = model.kv_shape.stored_as(kv_dtype)
        (use,) = model.attention_uses(shape, 64)
        kernels: TritonKernels = next(iter(candidates(use, (9, 0)).values()))
        launches.phase = "trial"
        with contextlib.suppress(UnsupportedModel):  # since nothing is computed
            check_attention(kernels, use)
        launches.phase = "load"
        self.kernels = kernels.for_service()
        storage = KVStorage(500, 64, shape, model.device)
        launch_all(model, storage, self.kernels.variants(), MAX_TOKENS)
        config = EngineConfig().on("cuda")
        graphs = None
        if has_graphs:
            graphs = StepGraphs(
                model,
                storage,
                self.kernels,
                max_sequence_tokens=MAX_TOKENS,
                max_step_tokens=config.step_tokens,
                max_requests=config.max_running_requests,
                capturer=_capture,
            )
        self.core = EngineCore.build(Runner(model, storage, self.kernels, graphs), PrefixCache(500, 64), config)
        self._random = np.random.default_rng(0)
        self._stems = [self._draw_tokens(9000), self._draw_tokens(3000), self._draw_tokens(700)]

    def serve(self, num_requests: int) -> None:
        """Answer requests, some together and some alone, some of which also decode.

        Their prompts continue the beginning of one of three stems.
        """
        while num_requests:
            num_together = min(num_requests, int(self._random.choice((1, 2, 5, 30, 64))))
            num_requests -= num_together
            self.ask([self._draw_prompt(num_together) for _ in range(num_together)], int(self._random.choice((0, 2))))

    def ask(self, prompts: Sequence[np.ndarray[Any, Any]], max_new_tokens: int) -> None:
        """Answer prompts that arrive together; with 0 new tokens, only prefill them."""
        futures: list[Future[Any]] = []
        for prompt in prompts:
            futures.append(Future())
            params = PrefillParams(prompt.tobytes(), Caller("tenant"))
            generation = None
            if max_new_tokens:
                generation = Generation(Sampling(max_new_tokens, seed=0, ignore_eos=True), frozenset(), lambda _: None)
            namespace = Namespace("model", "tenant")
            self.core.submit(Request(params, namespace, futures[-1], time.monotonic(), generation))
        while self.core.has_work:
            self.core.step()
        for future in futures:
            future.result(0)

    def _draw_prompt(self, num_together: int) -> np.ndarray[Any, Any]:
        stem = self._stems[self._random.integers(len(self._stems))]
        num_shared = self._random.choice((0, 64, 100, 256, 640, self._random.integers(1, 700)))
        num_shared = len(stem) if self._random.random() < 0.2 else num_shared
        max_new_tokens = 40 if num_together > 5 else 700
        num_new = self._random.choice((1, 2, 7, 16, 17, self._random.integers(1, max_new_tokens)))
        return np.concatenate((stem[:num_shared], self._draw_tokens(num_new)))

    def _draw_tokens(self, num_tokens: int) -> np.ndarray[Any, Any]:
        return self._random.integers(0, VOCAB_SIZE, num_tokens).astype("<u4")


def _capture(compute: Callable[[], StepOutputs]) -> Callable[[], StepOutputs]:
    """Imitate the capture of a graph: compute a step once. The replay returns the outputs of that step."""
    outputs = compute()
    return lambda: outputs


def _build_model(is_exact: bool, head_dim: int) -> Model:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=MAX_TOKENS,
        eos_token_id=None,
    )
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    module = LlamaForCausalLM(config).to(torch.bfloat16)
    return Model("traced", module, torch.device("cpu"), is_exact=is_exact, is_fused=True)


def _imitate_gpu(patch: pytest.MonkeyPatch, is_exact: bool) -> None:
    """Let a model on a CPU use the functions for a GPU, and let checks accept results that were not computed."""

    def launch_and_agree(own: Any, fused: Any, like: torch.Tensor) -> bool:
        for num_rows in (1, 17):
            fused(torch.zeros(1, num_rows, like.shape[0]).to(like))
        return True

    def choose_tiles(weight: torch.Tensor, bias: torch.Tensor | None) -> Tiles:
        return try_tiles(weight, bias) or "one size"

    def tiled(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
        return linear(rows, weight, bias, has_large_tiles=tiles == "both sizes")

    def make_exact(module: Any, _: Any) -> exactness.ExactFunctions:
        matmuls = exactness._Matmuls(module, choose_tiles, tiled)
        assert functional.linear in matmuls.functions
        return exactness.ExactFunctions(matmuls.functions | row_functions())

    def read_zeros(layout: Any, outputs: StepOutputs) -> StepResult:
        num_rows = len(layout.logit_rows)
        return StepResult(torch.zeros(num_rows, VOCAB_SIZE), [5] * num_rows, [True] * layout.batch.num_requests)

    patch.setattr(gpu_layers, "agree", launch_and_agree)
    patch.setattr(gpu_layers, "rows_agree", lambda fused, like: launch_and_agree(fused, fused, like))
    patch.setattr(model_module, "make_exact", make_exact)
    patch.setattr(model_module, "padded_tokens", lambda num_tokens, _: exactness.padded_tokens(num_tokens, GPU))
    patch.setattr(runner_module, "_read", read_zeros)
    if not is_exact:  # PyTorch's matmuls would take most of the time of a test

        def linear_of_zeros(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            return rows.new_zeros(*rows.shape[:-1], weight.shape[0])

        patch.setattr(functional, "linear", linear_of_zeros)
