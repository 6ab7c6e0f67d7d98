"""Results of an `LLM`. Names are those of vLLM, where it has the same result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radixkv.api.miss_reason import MissReason
from radixkv.api.result import TokenLogprobs, Usage
from radixkv.service.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token, from the model's raw logits: without penalties or temperature.

    Attributes:
        logprob: the log probability.
        rank: 1 for the most likely token; None if the token is not among the most likely ones that were requested.
        decoded_token: the text of the token after other text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: index among the completions of the prompt.
        text: text of the completion, without the stop string or the stop token that ended it; empty with
            `detokenize=False`.
        token_ids: tokens of the completion, including the stop token or the tokens of the stop string.
        cumulative_logprob: sum of the log probabilities of `token_ids`; None unless `logprobs` were requested.
        logprobs: for each token, its log probability and those of the most likely tokens, by token id; None unless
            requested.
        finish_reason: `stop`, or `length` if the completion has the maximum number of tokens.
        stop_reason: the stop string, or the one of `stop_token_ids`, that ended the completion; None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The completions of a prompt.

    Attributes:
        request_id: the number of the prompt since the `LLM` was created, as text.
        prompt: text of the prompt; None for a prompt of token ids without text.
        prompt_token_ids: tokens of the prompt.
        prompt_logprobs: for each token of the prompt, its log probability and those of the most likely tokens, by token
            id; None for the first token. None unless requested.
        outputs: the completions.
        finished: true.
        num_cached_tokens: tokens of the prompt that the first completion did not compute, but reused.
        miss_reason: why no more tokens were reused, such as `COLD`; `NONE` if all but the last were, which is always
            computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    miss_reason: str = MissReason.NONE.value


@dataclass(frozen=True, slots=True, eq=False)
class PrefillOutput:
    """What the model predicts after a prompt.

    Attributes:
        request_id: the number of the prompt since the `LLM` was created, as text.
        prompt: text of the prompt; None for a prompt of token ids without text.
        prompt_token_ids: tokens of the prompt.
        logits: logits of the next token, float32 `[vocab_size]`.
        next_token_id: the most likely next token.
        top_logprobs: `(token_id, logprob)` of the most likely next tokens, most likely first; empty unless requested.
        usage: how many tokens of the prompt were reused, computed and published.
        miss_reason: why no more tokens were reused, such as `COLD`; `NONE` if all but the last were, which is always
            computed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    logits: npt.NDArray[np.float32]
    next_token_id: int
    top_logprobs: tuple[tuple[int, float], ...]
    usage: Usage
    miss_reason: str

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed, but reused."""
        return self.usage.cached_tokens


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely a continuation of a context is.

    Attributes:
        logprob: sum of `token_logprobs`.
        is_greedy: whether each token is the most likely one, so that greedy decoding generates the continuation.
        token_ids: tokens of the continuation.
        token_logprobs: the log probability of each token.
        num_cached_tokens: tokens of the context that were not computed for this continuation, but reused.
    """

    logprob: float
    is_greedy: bool
    token_ids: list[int]
    token_logprobs: list[float]
    num_cached_tokens: int


def logprobs_by_id(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    """Return, for each token, the log probabilities of the token and of the most likely tokens, by token id.

    Args:
        token_ids: the tokens.
        logprobs: the log probabilities at the position of each token.
        tokenizer: the model's tokenizer; None for no texts.
    """

    def text_of(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    rows = []
    for token_id, token_logprobs in zip(token_ids, logprobs, strict=True):
        ranks = {top_id: rank for rank, (top_id, _) in enumerate(token_logprobs.top, 1)}
        row = {token_id: Logprob(token_logprobs.logprob, ranks.get(token_id), text_of(token_id))}
        for top_id, logprob in token_logprobs.top:
            row.setdefault(top_id, Logprob(logprob, ranks[top_id], text_of(top_id)))
        rows.append(row)
    return rows
