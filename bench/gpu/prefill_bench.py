"""Times a prompt after a cached prefix: with the cache, without it, without CUDA graphs, and with transformers."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from bench.exactness import BLOCK_SIZE
from bench.parts.device_time import DeviceRates
from bench.parts.kernel_row import Row, describe_error
from bench.parts.peers.transformers_prefix import Tokens, TransformersPrefix
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Request

# Maximum error of logits, relative to their norm: rounding in bfloat16 over 32 layers. With wrong tokens it exceeds 1.
_TOLERANCE = 0.1

# A long suffix is also computed in steps of this size, in which the device may wait for launches.
_SHORT_STEP_TOKENS = 512

# Without the cache, a prompt with a prefix of at least this length takes seconds, so it is recomputed only once.
_LONG_PREFIX_TOKENS = 32_768


class PrefillBench:
    """An engine core and one long prompt. Each measured prefix is a prefix of this prompt.

    Args:
        runner: a runner whose pool can hold the longest prompt twice.
        longest_prefix: number of tokens of the long prompt.
        step_tokens: maximum number of tokens per forward pass.
        rates: memory and matmul rates of this device.
    """

    def __init__(self, runner: Runner, longest_prefix: int, step_tokens: int, rates: DeviceRates) -> None:
        self._model = runner.model
        self._step_tokens = step_tokens
        self._rates = rates
        cache, config = PrefixCache(runner.storage.num_blocks, BLOCK_SIZE), EngineConfig(max_step_tokens=step_tokens)
        self._core = EngineCore.build(runner, cache, config)
        self._core_without_graphs = (
            EngineCore.build(runner.without_graphs(), cache, config) if runner.has_graphs else None
        )
        self._core_of_short_steps = EngineCore.build(runner, cache, EngineConfig(max_step_tokens=_SHORT_STEP_TOKENS))
        self._random = np.random.default_rng(0)
        self._long_prompt = self._draw_tokens(longest_prefix)
        self._first_suffix_tokens = itertools.count()

    @functools.cached_property
    def _transformers(self) -> TransformersPrefix:
        return TransformersPrefix(self._model, self._long_prompt, self._step_tokens)

    def _draw_tokens(self, num_tokens: int) -> Tokens:
        return self._random.integers(0, self._model.vocab_size, num_tokens).astype("<u4")

    def cache_prefix(self, prefix_tokens: int) -> None:
        """Compute this prefix of the long prompt, so that it is cached."""
        if prefix_tokens:
            self.ask(self._long_prompt[:prefix_tokens])

    def prompt(self, suffix_tokens: int, prefix_tokens: int) -> Tokens:
        """Build a prompt of which exactly the prefix is cached: no two suffixes begin with the same token."""
        suffix = self._draw_tokens(suffix_tokens)
        # More of the long prompt than the prefix may be cached, so the suffix must not begin like its continuation.
        next_token = self._long_prompt[prefix_tokens : prefix_tokens + 1]
        excluded = {int(token) for token in (*self._long_prompt[:1], *next_token)}
        suffix[0] = next(token for token in self._first_suffix_tokens if token not in excluded)
        assert suffix[0] < self._model.vocab_size, (
            "every token of the vocabulary is already the first token of a suffix"
        )
        return np.concatenate((self._long_prompt[:prefix_tokens], suffix))

    def ask(
        self, prompt: Tokens, *, reads: bool = True, wants_logits: bool = False, core: EngineCore | None = None
    ) -> PrefillResult:
        """Compute one prompt. If the cache is not read, it is not written either."""
        core = core or self._core
        future: Future[PrefillResult] = Future()
        params = PrefillParams(prompt.tobytes(), return_logits=wants_logits, read_cache=reads, write_cache=reads)
        core.submit(Request(params, Namespace("bench"), future, time.monotonic()))
        while core.has_work:
            core.step()
        return future.result(0)

    def measure(self, suffix_tokens: int, prefix_tokens: int, rounds: int) -> Iterator[Row]:
        """Measure one row, if the answers agree.

        Yields:
            The same row several times: first with the time to first token, then with one more variant each time. Each
            other variant of radixkv is timed alternately with the cached prompt. The ratio of a variant is its time
            divided by the time to first token.
        """
        self.cache_prefix(prefix_tokens)
        row, prompt, logits = self._compare(suffix_tokens, prefix_tokens)
        if logits is None:
            yield row
            return

        seconds: dict[str, list[float]] = {"ttft": []}  # by variant
        make_prompt = functools.partial(self.prompt, suffix_tokens, prefix_tokens)
        for _ in range(rounds):
            seconds["ttft"].append(_time_call(functools.partial(self.ask, make_prompt())))
        yield self._add_medians(row, seconds)

        variants: dict[str, Callable[[Tokens], float]] = {}
        if (core := self._core_without_graphs) is not None:
            variants["launched"] = lambda prompt: _time_call(lambda: self.ask(prompt, core=core))
        if suffix_tokens > _SHORT_STEP_TOKENS:
            variants["short_steps"] = lambda prompt: _time_call(
                lambda: self.ask(prompt, core=self._core_of_short_steps)
            )
        variants["recompute"] = lambda prompt: _time_call(lambda: self.ask(prompt, reads=False))
        for variant, time_variant in variants.items():
            is_slow = variant == "recompute" and prefix_tokens >= _LONG_PREFIX_TOKENS
            try:
                self._time_in_turn(variant, time_variant, make_prompt, seconds, 1 if is_slow else rounds)
            except Exception as raised:  # noqa: BLE001 - out of memory, say; the other variants are timed
                row[f"{variant}_reason"] = describe_error(raised)
            yield self._add_medians(row, seconds)

        row |= self._compare_with_transformers(prompt, prefix_tokens, logits)
        if row["transformers_reason"] is None:
            with self._transformers.running():  # the attention is switched outside of the timed calls
                for _ in range(rounds):
                    self._transformers.restore(prefix_tokens)
                    answer_prompt = functools.partial(
                        self._transformers.next_token, make_prompt()[prefix_tokens:], prefix_tokens
                    )
                    elapsed_s = _time_call(answer_prompt)
                    seconds.setdefault("transformers", []).append(elapsed_s)
        yield self._add_medians(row, seconds)

    def _time_in_turn(
        self,
        variant: str,
        time_variant: Callable[[Tokens], float],
        make_prompt: Callable[[], Tokens],
        seconds: dict[str, list[float]],
        rounds: int,
    ) -> None:
        """Time a variant alternately with the cached prompt. Each time has a new prompt, since prompts are cached."""
        for _ in range(rounds):
            seconds["ttft"].append(_time_call(functools.partial(self.ask, make_prompt())))
            elapsed_s = time_variant(make_prompt())
            seconds.setdefault(variant, []).append(elapsed_s)

    def _add_medians(self, row: Row, seconds: dict[str, list[float]]) -> Row:
        """Set the median times and the ratios of the variants that have been timed. Returns the same row."""
        row |= {f"{variant}_ms": statistics.median(times_s) * 1e3 for variant, times_s in seconds.items()}
        row["weights_ratio"] = row["ttft_ms"] / self.weights_ms
        row |= {f"{variant}_ratio": row[f"{variant}_ms"] / row["ttft_ms"] for variant in seconds if variant != "ttft"}
        return row

    def _compare(self, suffix_tokens: int, prefix_tokens: int) -> tuple[Row, Tokens, npt.NDArray[np.float32] | None]:
        """Compute a prompt with the cache and without, and compare the answers. This also warms up.

        Returns:
            The row so far, the prompt, and its logits; None for the logits if the answers differ, or if the number of
            cached tokens is not that of the prefix.
        """
        prompt = self.prompt(suffix_tokens, prefix_tokens)
        warm = self.ask(prompt, wants_logits=True)
        cold = self.ask(prompt, reads=False, wants_logits=True)
        if (cached_tokens := warm.usage.cached_tokens) != prefix_tokens:
            reason = f"expected {prefix_tokens} cached tokens, got {cached_tokens}"
            return {"is_right": False, "reason": reason}, prompt, None
        assert warm.logits is not None
        assert cold.logits is not None
        error = _difference(warm.logits, cold.logits)
        row: Row = {"is_right": error <= (0 if self._model.is_exact else _TOLERANCE), "error": _finite_or_none(error)}
        if not row["is_right"]:
            return {**row, "reason": f"the cache changes the answer: off by {error:.3g}"}, prompt, None
        return row, prompt, warm.logits

    def _compare_with_transformers(self, prompt: Tokens, prefix_tokens: int, logits: npt.NDArray[np.float32]) -> Row:
        try:
            with self._transformers.running():
                self._transformers.restore(prefix_tokens)
                error = _difference(self._transformers.logits(prompt[prefix_tokens:], prefix_tokens), logits)
        except Exception as raised:  # noqa: BLE001 - whatever transformers raises, radixkv's times are valid
            return {"transformers_error": None, "transformers_reason": describe_error(raised)}
        reason = None if error <= _TOLERANCE else f"wrong: off by {error:.3g}, at most {_TOLERANCE}"
        return {"transformers_error": _finite_or_none(error), "transformers_reason": reason}

    @property
    def weights_ms(self) -> float:
        """Milliseconds to read all weights once, without the embeddings, of which only one row per token is read."""
        module = self._model.module
        embeddings = module.get_input_embeddings().weight
        num_bytes: int = sum(each.nbytes for each in module.parameters() if each is not embeddings)
        return num_bytes / self._rates.bytes_per_s * 1e3


def _time_call(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def _difference(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    """Return the error of logits relative to their norm; infinite if a logit is not finite."""
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def _finite_or_none(error: float) -> float | None:
    return error if np.isfinite(error) else None
