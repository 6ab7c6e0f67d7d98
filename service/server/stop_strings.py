"""Strings that end an answer: read from a request, looked for in the text of its tokens."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from radixkv.api.params import PrefillParams
from radixkv.api.result import FinishReason, GenerateResult
from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.text.answer_text import AnswerText
from radixkv.service.text.text_stream import NUM_PROMPT_IDS
from radixkv.tokens import TOKEN_BYTES

MAX_STOPS = 16
MAX_STOP_CHARS = 256

_logger = logging.getLogger(__name__)


class StopStrings:
    """Watches the answers to one prompt for strings that end them. To be used by one thread at a time.

        told tokens ─▶ num_wanted: as many as belong to the answer ─▶ send them; has_ended: finish the generation
        result ──────▶ cut: the same answer, without what was generated after the string

    Args:
        answers: the text of each answer.
    """

    def __init__(self, answers: Sequence[AnswerText]) -> None:
        self._answers = answers

    def num_wanted(self, index: int, token_ids: Sequence[int]) -> int:
        """Take new tokens of an answer, and return how many of them belong to it: none after a string is complete."""
        answer = self._answers[index]
        before = answer.num_tokens
        answer.put(token_ids)
        return answer.num_tokens - before

    def has_ended(self, index: int) -> bool:
        """Whether a string has ended an answer."""
        return self._answers[index].matched is not None

    def cut(self, index: int, result: GenerateResult) -> tuple[GenerateResult, str]:
        """Take the tokens of a result that were not taken before, and cut it after a string; not its log probabilities.

        Returns:
            The result, and the string that ended it; the result as it is and an empty text if none did.
        """
        answer = self._answers[index]
        answer.put(result.token_ids[answer.num_tokens :])
        if answer.matched is None:
            return result, ""
        num_tokens = answer.num_tokens
        cut = dataclasses.replace(
            result,
            token_ids=result.token_ids[:num_tokens],
            usage=dataclasses.replace(result.usage, generated_tokens=num_tokens),
            finish_reason=FinishReason.STOP,
        )
        return cut, answer.matched


def require_stops(stops: Sequence[str]) -> None:
    """Refuse strings that can end nothing, and more than a server wants to look for.

    Raises:
        InvalidRequest: the message names the field.
    """
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: expected at most {MAX_STOPS} strings, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"stop[{index}]: expected 1 to {MAX_STOP_CHARS} characters, got {len(stop)}")


async def stop_strings(
    tokenizer: ModelTokenizer, stops: Sequence[str], params: PrefillParams, sampling: Sampling, num_answers: int
) -> StopStrings | None:
    """Make what watches the answers to a prompt; None if there are no strings. Loads the tokenizer on another thread.

    Args:
        tokenizer: the model's.
        stops: the strings; of equal ones one is enough.
        params, sampling: the prompt, and how it goes on.
        num_answers: answers to the prompt.

    Raises:
        InvalidRequest: the strings can't be looked for, or the model has no tokenizer.
    """
    if not stops:
        return None
    require_stops(stops)
    try:
        loaded = await tokenizer.loaded()
    except ValueError as error:
        _logger.warning("stop strings were asked for, and there is no tokenizer: %s", error)  # has paths of ours
        raise InvalidRequest("stop: expected a model with a tokenizer, got one without") from error
    prompt_ids = np.frombuffer(params.tokens[-NUM_PROMPT_IDS * TOKEN_BYTES :], dtype="<u4").tolist()
    different = tuple(dict.fromkeys(stops))
    return StopStrings(
        [AnswerText(loaded.stream(prompt_ids), different, sampling.min_tokens) for _ in range(num_answers)]
    )
