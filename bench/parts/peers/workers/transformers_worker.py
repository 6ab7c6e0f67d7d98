"""Runs transformers: `generate` with a copied cache, or its continuous batching, depending on the mode."""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any

from bench.parts.peers.workers.loop import WorkerEngine, WorkerOptions, run_worker
from bench.parts.peers.workers.task import Done, Task

_PAGE_TOKENS = 256
_PAGES = 320  # 82 thousand tokens; requests that share a prefix share its pages
_STEP_TOKENS = 512


class _FirstToken:
    """A logits processor that records the time of the first logits, and changes nothing."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __call__(self, _: Any, scores: Any) -> Any:
        self.at_s = self.at_s or time.perf_counter()
        return scores


class Generate:
    """`generate`, used as in its documentation: a known prefix is computed once, and its cache is copied."""

    packages = ("transformers", "torch")

    def __init__(self, options: WorkerOptions) -> None:
        self._model = _load(options)
        self._prefix: list[int] = []
        self._cache: Any = None
        self.notes = ["generate() with a copy of a DynamicCache, in process; concurrent requests form one batch"]

    def run(self, task: Task) -> Done:
        """Run the prompts in batches of `at_once`."""
        if task.fills_cache:
            self._fill(task.prompts[0][: task.shared_tokens])
        first_s: list[float] = []
        token_ids: list[list[int]] = []
        start_s = time.perf_counter()
        for start in range(0, len(task.prompts), task.at_once):
            batch = task.prompts[start : start + task.at_once]
            seconds, answers = self._generate(batch, task.new_tokens, task.shared_tokens)
            first_s += [seconds] * len(batch)
            token_ids += answers
        return Done(time.perf_counter() - start_s, first_s, token_ids, [task.shared_tokens] * len(task.prompts))

    def _fill(self, prefix: list[int]) -> None:
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        with torch.inference_mode():
            cache_argument = {_cache_keyword(self._model): cache}
            self._model(input_ids=torch.tensor([prefix]), use_cache=True, logits_to_keep=1, **cache_argument)
        self._prefix = prefix
        self._cache = cache

    def _generate(self, prompts: list[list[int]], new_tokens: int, shared_tokens: int) -> tuple[float, list[list[int]]]:
        import torch

        first_token, cache_argument = _FirstToken(), {}
        start_s = time.perf_counter()
        if shared_tokens:
            if any(prompt[:shared_tokens] != self._prefix for prompt in prompts):
                raise ValueError("shared_tokens: the cache was filled with another prefix")
            cache = cache_argument[_cache_keyword(self._model)] = copy.deepcopy(self._cache)
            if len(prompts) > 1:
                cache.batch_repeat_interleave(len(prompts))
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                logits_processor=[first_token],
                **cache_argument,
            )
        assert first_token.at_s is not None
        return first_token.at_s - start_s, output[:, ids.shape[1] :].tolist()

    def close(self) -> None:
        """Do nothing: the model ends with the process."""


class Batching:
    """`init_continuous_batching`, whose manager shares the pages of equal prefixes."""

    packages = ("transformers", "torch")

    def __init__(self, options: WorkerOptions) -> None:
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        self._manager = _load(options).init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=_PAGES, page_size=_PAGE_TOKENS, max_batch_tokens=_STEP_TOKENS
            ),
        )
        self._manager.start()
        self.notes = ["init_continuous_batching(), in process"]

    def run(self, task: Task) -> Done:
        """Pass the prompts to the manager."""
        waiting = list(enumerate(task.prompts))[::-1]  # the next prompt is the last element
        indices: dict[str, int] = {}
        added_s: dict[int, float] = {}
        first_s: dict[int, float] = {}
        token_ids: dict[int, list[int]] = {}
        start_s = time.perf_counter()
        while len(token_ids) < len(task.prompts):
            while waiting and len(indices) < task.at_once:
                index, prompt = waiting.pop()
                added_s[index] = time.perf_counter()
                indices[self._manager.add_request(prompt, max_new_tokens=task.new_tokens, streaming=True)] = index
            answer = self._manager.get_result(timeout=1)
            if answer is None:
                if not self._manager.is_running():
                    raise RuntimeError("continuous batching: expected results, but its thread ended")
                continue
            if answer.error:
                raise RuntimeError(f"continuous batching: {answer.error}")
            index = indices[answer.request_id]
            if answer.generated_tokens:
                first_s.setdefault(index, time.perf_counter() - added_s[index])
            if answer.is_finished():
                token_ids[index] = list(answer.generated_tokens)
                del indices[answer.request_id]
        wall_s = time.perf_counter() - start_s
        order = range(len(task.prompts))
        return Done(wall_s, [first_s[each] for each in order], [token_ids[each] for each in order], [None] * len(order))

    def close(self) -> None:
        """Stop the manager's thread."""
        self._manager.stop(block=True)


def _cache_keyword(model: Any) -> str:
    """Return the name of a model's cache argument: `cache` since transformers 5.24, `past_key_values` before.

    `cache_name` in radixkv does the same, but a worker of another engine does not import radixkv, since its start is
    timed.
    """
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _load(options: WorkerOptions) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def start(options: WorkerOptions) -> WorkerEngine:
    """Start the engine that the mode names."""
    return Generate(options) if options.mode == "generate" else Batching(options)


if __name__ == "__main__":
    run_worker(start)
