"""Requests of language-model evaluations, in the forms of lm-evaluation-harness, answered by an `LLM`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from radixkv.errors import InvalidRequest, RequestError

if TYPE_CHECKING:
    from radixkv import LLM

_Answer = TypeVar("_Answer")

# Names of the maximum number of generated tokens, in the order in which lm-evaluation-harness reads them.
_MAX_TOKENS_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# What `SamplingParams.stop` accepts; other stop texts only cut the answer.
_MAX_STOPS = 16
_MAX_STOP_CHARS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class _ScoringRequest:
    """A continuation whose log probability is requested.

    Attributes:
        context, continuation: token ids, at least one each.
    """

    context: list[int]
    continuation: list[int]


class Evaluator:
    """Answers the three kinds of requests of lm-evaluation-harness. A prefix that contexts share is computed once.

    Requests with contexts are sorted by their tokens, so that those with a common prefix follow each other. Results are
    in the order of the requests.

    Args:
        llm: the model.
        max_gen_toks: maximum number of generated tokens of requests that do not set one.
        prefix_token_id: the token before texts that have no context; None for the model's BOS token, or its EOS token
            if it has no BOS token.
        use_tqdm: see `LLM.generate`.

    Raises:
        InvalidRequest: `prefix_token_id` is None, and the tokenizer names neither a BOS nor an EOS token.

    Attributes:
        num_prompt_tokens: tokens of all contexts of `loglikelihood` and `generate_until` so far.
        num_cached_tokens: how many of them were reused.
    """

    def __init__(
        self, llm: LLM, *, max_gen_toks: int = 256, prefix_token_id: int | None = None, use_tqdm: bool | None = None
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._llm = llm
        self._tokenizer = llm.get_tokenizer()
        self._max_gen_toks = max_gen_toks
        self._use_tqdm = use_tqdm
        if prefix_token_id is None:
            special_ids = (self._tokenizer.named_id(name) for name in ("bos_token", "eos_token"))
            prefix_token_id = next((each for each in special_ids if each is not None), None)
        if prefix_token_id is None:
            raise InvalidRequest("prefix_token_id: the tokenizer names neither a BOS nor an EOS token; pass an id")
        self.prefix_token_id = prefix_token_id

    def encode(self, text: str) -> list[int]:
        """Encode a text as a prompt. A BOS token is added if the model requires one and the text does not have it."""
        bos_id = self._tokenizer.named_id("bos_token")
        if bos_id is not None and text.startswith(self._tokenizer.special_tokens[bos_id]):
            return self._tokenizer.encode_rendered(text)
        return self._tokenizer.encode(text)

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Return the log probability of each continuation, and whether greedy decoding would generate it.

        A context and its continuation are encoded together. White space at the end of a context belongs to the
        continuation. Contexts and continuations that are too long lose their first tokens.

        Args:
            pairs: context and continuation. An empty context is replaced by the prefix token.

        Raises:
            InvalidRequest: a continuation has no tokens, or a text is not valid Unicode. The message names the request.
        """
        requests = []
        encode_context = functools.cache(self.encode)  # several continuations have the same context
        for index, (context, continuation) in enumerate(pairs):
            with _name_request(index):
                requests.append(self._encode_pair(context, continuation, encode_context))
        return self._answer_in_token_order(requests, lambda each: (*each.context, *each.continuation), self._score)

    def loglikelihood_rolling(self, texts: Sequence[str]) -> list[float]:
        """Return the log probability of each text after the prefix token.

        A text that is longer than the model allows is divided into windows of the maximum length, as in
        lm-evaluation-harness. Each token is predicted once; each window but the first begins with tokens of the
        previous one.

        Raises:
            InvalidRequest: a text is not valid Unicode. The message names the request.
        """
        windows: list[tuple[int, _ScoringRequest]] = []
        for index, text in enumerate(texts):
            with _name_request(index):
                windows += [(index, each) for each in self._windows(self.encode(text))]
        totals = [0.0] * len(texts)
        params = self._sampling_params(prompt_logprobs=0, max_tokens=1, detokenize=False)
        outputs = self._llm.generate(
            [[*each.context, *each.continuation] for _, each in windows], params, self._use_tqdm
        )
        for (index, window), output in zip(windows, outputs, strict=True):
            # One mapping from token ids to log probabilities for each position of the continuation.
            logprobs = (output.prompt_logprobs or [])[-len(window.continuation) :]
            pairs = zip(window.continuation, logprobs, strict=True)
            totals[index] += sum(by_id[token_id].logprob for token_id, by_id in pairs if by_id is not None)
        return totals

    def generate_until(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Generate texts, each of which ends before its first stop text.

        Args:
            requests: contexts and options: `until`, `max_gen_toks`, `do_sample`, and fields of `SamplingParams`. The
                answer is sampled if `do_sample` is true (with a temperature of 1 unless one is given), or if it is
                absent and a temperature above 0 is given. Otherwise it is greedy.

        Raises:
            InvalidRequest: an option is unknown or has a wrong value, or a context is not valid Unicode. The message
                names the request.
        """
        prepared = []
        for index, (context, options) in enumerate(requests):
            with _name_request(index):
                prepared.append(self._prepare_generation(context, dict(options)))

        def generate(ordered: Sequence[tuple[list[int], Any, list[str]]]) -> list[str]:
            outputs = self._llm.generate(
                [tokens for tokens, _, _ in ordered], [params for _, params, _ in ordered], self._use_tqdm
            )
            for output in outputs:
                self._count(len(output.prompt_token_ids), output.num_cached_tokens)
            return [_cut(output.outputs[0].text, until) for output, (_, _, until) in zip(outputs, ordered, strict=True)]

        return self._answer_in_token_order(prepared, lambda each: tuple(each[0]), generate)

    def _encode_pair(
        self, context: str, continuation: str, encode_context: Callable[[str], list[int]]
    ) -> _ScoringRequest:
        """Encode a context and its continuation, and drop what is too long."""
        if context:
            context_ids = encode_context(context.rstrip())
            continuation_ids = self.encode(context + continuation)[len(context_ids) :]
        else:
            context_ids, continuation_ids = [], self._tokenizer.encode_rendered(continuation)
        if not context_ids and continuation_ids[:1] == [self.prefix_token_id] and len(continuation_ids) > 1:
            context_ids, continuation_ids = continuation_ids[:1], continuation_ids[1:]
        if not context_ids:
            context_ids = [self.prefix_token_id]
        if not continuation_ids:
            raise InvalidRequest("expected a continuation of at least one token, got none")
        max_tokens = self._llm.max_model_len
        continuation_ids = continuation_ids[-(max_tokens - 1) :]
        return _ScoringRequest(context_ids[-(max_tokens - len(continuation_ids)) :], continuation_ids)

    def _score(self, requests: Sequence[_ScoringRequest]) -> list[tuple[float, bool]]:
        scores = self._llm.score(
            [each.context for each in requests], [each.continuation for each in requests], self._use_tqdm
        )
        for request, score in zip(requests, scores, strict=True):
            self._count(len(request.context), score.num_cached_tokens)
        return [(score.logprob, score.is_greedy) for score in scores]

    def _windows(self, tokens: list[int]) -> Iterator[_ScoringRequest]:
        """Divide a text into windows of context and tokens to predict."""
        # Predicted tokens per window; at least one token precedes them, and one token is generated after them.
        size = self._llm.max_model_len - 2
        for start in range(0, len(tokens), size):
            end = min(start + size, len(tokens))
            # Each window but the first has `size + 1` tokens. The last one therefore has more context than the others.
            context = [self.prefix_token_id] if start == 0 else tokens[end - size - 1 : start]
            yield _ScoringRequest(context, tokens[start:end])

    def _prepare_generation(self, context: str, options: dict[str, Any]) -> tuple[list[int], Any, list[str]]:
        """Return the tokens of a context, its sampling parameters, and the texts at which the answer ends."""
        until = options.pop("until", None) or []
        until = [until] if isinstance(until, str) else [each for each in until if each]
        maxima = [options.pop(name, None) for name in _MAX_TOKENS_OPTIONS]
        max_tokens = next((each for each in maxima if each is not None), self._max_gen_toks)
        temperature = options.pop("temperature", None)
        is_sampled = options.pop("do_sample", None)
        if is_sampled is None:
            is_sampled = bool(temperature)
        if not is_sampled:
            temperature = 0.0
        stops = [each for each in until if len(each) <= _MAX_STOP_CHARS][:_MAX_STOPS]
        try:
            params = self._sampling_params(
                max_tokens=max_tokens, temperature=1.0 if temperature is None else temperature, stop=stops, **options
            )
        except TypeError as error:  # an option is no field of SamplingParams
            raise InvalidRequest(
                "expected options of generate_until and fields of SamplingParams, got " + ", ".join(options)
            ) from error
        max_context_tokens = self._llm.max_model_len - max_tokens
        if max_context_tokens < 1:
            raise InvalidRequest(
                f"max_gen_toks: expected fewer than {self._llm.max_model_len}, the longest sequence of the "
                f"model, got {max_tokens}"
            )
        tokens = self.encode(context) if context else [self.prefix_token_id]
        return tokens[-max_context_tokens:], params, until

    def _sampling_params(self, **options: Any) -> Any:
        from radixkv import SamplingParams

        return SamplingParams(**options)

    def _answer_in_token_order(
        self,
        requests: Sequence[Any],
        tokens_of: Callable[[Any], tuple[int, ...]],
        answer: Callable[[Sequence[Any]], list[_Answer]],
    ) -> list[_Answer]:
        """Answer requests sorted by their tokens; return the answers in the order of the requests."""
        order = sorted(range(len(requests)), key=lambda index: tokens_of(requests[index]))
        answers = dict(zip(order, answer([requests[index] for index in order]), strict=True)) if order else {}
        return [answers[index] for index in range(len(requests))]

    def _count(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached_tokens


@contextlib.contextmanager
def _name_request(index: int) -> Iterator[None]:
    """Add the index of a request to the message of an error."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"requests[{index}]: {error}") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"requests[{index}]: {error}") from error


def _cut(text: str, until: Sequence[str]) -> str:
    """Return the text before the first of the texts in `until`."""
    for each in until:
        text = text.partition(each)[0]
    return text
