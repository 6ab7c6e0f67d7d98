"""One completion of a prompt, from the engine's tokens to its text and log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.params import PrefillParams
from radixkv.api.result import FinishReason, GeneratedTokens, GenerateResult, GenerationFuture, OnTokens, TokenLogprobs
from radixkv.api.sampling import Sampling
from radixkv.service.offline.outputs import CompletionOutput, Logprob, RequestOutput, logprobs_by_id
from radixkv.service.offline.prompts import PreparedPrompt
from radixkv.service.offline.sampling_params import SamplingParams
from radixkv.service.text.answer_text import AnswerText
from radixkv.service.text.text_stream import last_ids
from radixkv.service.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine


class Completion:
    """Collects one completion of a prompt.

        start ─▶ add, for new tokens before the end, if they are needed ─▶ end ─▶ request_output

    Args:
        index: index among the completions of the prompt.
        params: the prompt.
        sampling: `options` in the form of the engine, before `Sampling.of_answer`.
        options: the parameters as the caller passed them.
        eos_token_ids: the model's own end-of-sequence tokens.
        tokenizer: the model's tokenizer; None if no text is needed.
    """

    def __init__(
        self,
        index: int,
        params: PrefillParams,
        sampling: Sampling,
        options: SamplingParams,
        eos_token_ids: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._index = index
        self._params = params
        self._sampling = sampling.of_answer(index)
        self._options = options
        self._eos_token_ids = frozenset() if options.ignore_eos else eos_token_ids
        self._tokenizer = tokenizer
        self._answer: AnswerText | None = None
        if tokenizer is not None:
            shown = None if options.skip_special_tokens else tokenizer.special_tokens
            self._answer = AnswerText(
                tokenizer.stream(last_ids(params.tokens), shown), options.stops, options.min_tokens
            )
        self._pieces: list[str] = []
        self._logprobs = LogprobTable()
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._future = GenerationFuture()
        self._result: GenerateResult | None = None

    def start(self, engine: Engine, on_tokens: OnTokens) -> GenerationFuture:
        """Queue the request. Raises what `Engine.generate` raises.

        Args:
            engine: generates the completion.
            on_tokens: called on the engine's thread with new tokens, which the caller passes to `add` on one thread.
                Called only if tokens are needed before the end: for stop strings or log probabilities.
        """
        sampling = self._sampling
        has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        needs_tokens = has_logprobs or bool(self._options.stops)
        self._future = engine.generate(self._params, sampling, on_tokens if needs_tokens else _ignore)
        return self._future

    def add(self, tokens: GeneratedTokens) -> None:
        """Add new tokens. Ends the generation at a stop string."""
        self._logprobs.extend(tokens.logprobs)
        self._prompt_logprobs = tokens.prompt_logprobs or self._prompt_logprobs
        if self._answer is not None and self._options.stops:
            self._pieces.append(self._answer.put(tokens.token_ids))
            if self._answer.matched is not None:
                self._future.finish()

    def end(self, result: GenerateResult) -> CompletionOutput:
        """Add the result of the engine, and return the completion."""
        self._result = result
        self._logprobs.extend(result.logprobs)
        self._prompt_logprobs = result.prompt_logprobs or self._prompt_logprobs
        token_ids, answer = list(result.token_ids), self._answer
        stop_token = self._stop_token(result)
        has_stop_text = self._options.include_stop_str_in_output
        if answer is not None:
            text_end = len(token_ids) if stop_token is None or has_stop_text else -1
            self._pieces.append(answer.finish(token_ids[answer.num_tokens : text_end]))
        matched = None if answer is None else answer.matched
        if answer is not None and matched is not None:
            del token_ids[answer.num_tokens :]
            self._logprobs.truncate(len(token_ids))
            if has_stop_text:
                self._pieces.append(matched)
        is_stopped = matched is not None or result.finish_reason is FinishReason.STOP
        has_logprobs = self._sampling.logprobs is not None
        return CompletionOutput(
            index=self._index,
            text="".join(self._pieces),
            token_ids=token_ids,
            cumulative_logprob=sum(each.logprob for each in self._logprobs) if has_logprobs else None,
            logprobs=logprobs_by_id(token_ids, self._logprobs, self._tokenizer) if has_logprobs else None,
            finish_reason="stop" if is_stopped else "length",
            # None for an end-of-sequence token, as in vLLM.
            stop_reason=stop_token if matched is None and stop_token not in self._eos_token_ids else matched,
        )

    def request_output(self, prompt: PreparedPrompt, outputs: list[CompletionOutput]) -> RequestOutput:
        """Return all completions of the prompt. This one is the first of them, and has ended."""
        result, token_ids = self._result, prompt.token_ids
        assert result is not None, "it has ended"
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if self._sampling.prompt_logprobs is not None:
            prompt_logprobs = [None, *logprobs_by_id(token_ids[1:], self._prompt_logprobs, self._tokenizer)]
        return RequestOutput(
            request_id=self._params.request_id,
            prompt=prompt.text,
            prompt_token_ids=token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=True,
            num_cached_tokens=result.usage.cached_tokens,
            miss_reason=result.miss_reason.value,
        )

    def _stop_token(self, result: GenerateResult) -> int | None:
        """Return the stop token that ended the generation; None if it ended for another reason."""
        last = result.token_ids[-1]
        is_stop_token = last in self._sampling.stop_token_ids | self._eos_token_ids
        return last if is_stop_token and result.finish_reason is FinishReason.STOP else None


def _ignore(tokens: GeneratedTokens) -> None:
    pass
