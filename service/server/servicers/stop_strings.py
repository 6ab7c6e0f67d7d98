"""Stop strings: validated, searched for in the text of the completions, and cut from their results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from radixkv.api.params import PrefillParams
from radixkv.api.result import FinishReason, GenerateResult
from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.text.answer_text import AnswerText
from radixkv.service.text.text_stream import last_ids

MAX_STOPS = 16
MAX_STOP_CHARS = 256


class StopStrings:
    """Searches the completions of one prompt for stop strings. For use by one thread at a time.

        new tokens ─▶ add_tokens: the tokens up to a stop string ─▶ send them; has_ended: finish the generation
        result ─────▶ cut: the result without the tokens after the stop string

    Args:
        answers: the text of each completion.
    """

    def __init__(self, answers: Sequence[AnswerText]) -> None:
        self._answers = answers

    def add_tokens(self, index: int, token_ids: Sequence[int]) -> int:
        """Add new tokens of a completion, and return how many of them to keep: all, or those up to a stop string."""
        answer = self._answers[index]
        num_before = answer.num_tokens
        answer.put(token_ids)
        return answer.num_tokens - num_before

    def has_ended(self, index: int) -> bool:
        """Return whether a stop string has ended a completion."""
        return self._answers[index].matched is not None

    def cut(self, index: int, result: GenerateResult) -> tuple[GenerateResult, str]:
        """Add the tokens of a result that were not added before, and cut the result after a stop string.

        Log probabilities are not cut.

        Returns:
            The result and the stop string that ended it; the unchanged result and an empty string without one.
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
    """Refuse stop strings that are empty, too long or too many.

    Raises:
        InvalidRequest: the message names the field.
    """
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop: expected at most {MAX_STOPS} strings, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest(f"stop[{index}]: expected 1 to {MAX_STOP_CHARS} characters, got {len(stop)}")


async def stop_strings(
    tokenizer: ModelTokenizer, stops: Sequence[str], params: PrefillParams, sampling: Sampling, num_completions: int
) -> StopStrings | None:
    """Return the stop strings of a call; None without any. Loads the tokenizer on another thread.

    Args:
        tokenizer: the model's tokenizer.
        stops: the strings; duplicates are ignored.
        params: the prompt.
        sampling: the options; the first `min_tokens` tokens of a completion cannot complete a stop string.
        num_completions: number of completions of the prompt.

    Raises:
        InvalidRequest: a string is invalid, or the model has no tokenizer.
    """
    if not stops:
        return None
    require_stops(stops)
    model_tokenizer = await tokenizer.require_async("stop", "stop strings require")
    prompt_ids = last_ids(params.tokens)
    unique_stops = tuple(dict.fromkeys(stops))
    return StopStrings(
        [
            AnswerText(model_tokenizer.stream(prompt_ids), unique_stops, sampling.min_tokens)
            for _ in range(num_completions)
        ]
    )
