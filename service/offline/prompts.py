"""Prompts in the forms that vLLM accepts: text, token ids, or a mapping with either."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from radixkv.errors import InvalidRequest, RequestError
from radixkv.service.field_names import prompt_field_names, renamed_fields
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.token_ids import TokenIds, pack_token_ids

_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
# The names of fields in this API, by their names in messages of the engine.
_FIELD_NAMES = prompt_field_names("prompt_token_ids", "max_tokens")


class TextPrompt(TypedDict):
    """A prompt as text. Prompts with different salts never share cached tokens."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, and its text if that is known. Prompts with different salts never share cached tokens."""

    prompt_token_ids: TokenIds
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptInput = str | TokenIds | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as the engine reads it.

    Attributes:
        text: text of the prompt; None for a prompt of token ids without text.
        packed: token ids of the prompt as little-endian uint32 bytes.
        salt: prompts with different salts never share cached tokens.
    """

    text: str | None
    packed: bytes
    salt: str = ""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        ids: list[int] = np.frombuffer(self.packed, dtype="<u4").tolist()
        return ids

    @classmethod
    def of(cls, prompt: object, get_tokenizer: Callable[[], Tokenizer]) -> PreparedPrompt:
        """Encode a prompt.

        Args:
            prompt: text, token ids, or a mapping with either.
            get_tokenizer: returns the tokenizer of the model.

        Raises:
            RequestError, TypeError, ValueError: the prompt is wrong, or is text and the model has no tokenizer.
        """
        if not isinstance(prompt, Mapping):
            return cls._of_text_or_ids(prompt, get_tokenizer)
        for key in prompt:
            if key not in _KEYS:
                raise InvalidRequest(f"{key}: expected one of the keys {', '.join(sorted(_KEYS))}, got another key")
        if not prompt.keys() & {"prompt", "prompt_token_ids"}:
            raise InvalidRequest("expected the key prompt or prompt_token_ids, got neither")
        salt, text = prompt.get("cache_salt") or "", prompt.get("prompt")
        if not isinstance(salt, str) or not isinstance(text, str | None):
            raise InvalidRequest("prompt, cache_salt: expected text, got another type")
        if "prompt_token_ids" in prompt:
            return cls(text, pack_token_ids(prompt["prompt_token_ids"]), salt)
        return cls(text, cls._of_text_or_ids(text, get_tokenizer).packed, salt)

    @classmethod
    def _of_text_or_ids(cls, prompt: object, get_tokenizer: Callable[[], Tokenizer]) -> PreparedPrompt:
        if isinstance(prompt, str):
            return cls(prompt, pack_token_ids(get_tokenizer().encode(prompt)))
        if isinstance(prompt, Sequence) or hasattr(prompt, "__array__"):
            return cls(None, pack_token_ids(cast("Any", prompt)))
        raise InvalidRequest(f"expected text, token ids, or a mapping with either, got {type(prompt).__name__}")


def prompt_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return a list of prompts; a single prompt becomes a list of one.

    Raises:
        InvalidRequest: `prompts` is neither a prompt nor a list.
    """
    if isinstance(prompts, str | Mapping):
        return [cast("PromptInput", prompts)]
    if not isinstance(prompts, Sequence) and not hasattr(prompts, "__array__"):
        raise InvalidRequest(f"prompts: expected a prompt or a list of prompts, got {type(prompts).__name__}")
    items = list(cast("Sequence[Any]", prompts))
    return [cast("PromptInput", prompts)] if items and isinstance(items[0], Integral) else items


def prepare_pair(
    context: object, continuation: object, get_tokenizer: Callable[[], Tokenizer]
) -> tuple[PreparedPrompt, PreparedPrompt]:
    """Encode a context and its continuation.

    Two texts are encoded together, as in lm-evaluation-harness: white space at the end of the context belongs to the
    continuation, and the tokens of the continuation are those after the tokens of the context alone.

    Args:
        context, continuation: see `PreparedPrompt.of`.
        get_tokenizer: returns the tokenizer of the model.

    Raises:
        RequestError, TypeError, ValueError: see `PreparedPrompt.of`.
    """
    if isinstance(context, str) and isinstance(continuation, str):
        stripped = context.rstrip()
        context_ids = get_tokenizer().encode(stripped)
        continuation_ids = get_tokenizer().encode(context + continuation)[len(context_ids) :]
        return (
            PreparedPrompt(context, pack_token_ids(context_ids)),
            PreparedPrompt(continuation, pack_token_ids(continuation_ids)),
        )
    prompt = PreparedPrompt.of(context, get_tokenizer)
    if isinstance(continuation, str):  # without special tokens at its beginning
        return prompt, PreparedPrompt(continuation, pack_token_ids(get_tokenizer().encode_rendered(continuation)))
    return prompt, PreparedPrompt.of(continuation, get_tokenizer)


@contextlib.contextmanager
def error_place(place: str) -> Iterator[None]:
    """Add the place of a prompt, such as `prompts[3]`, to the messages of errors, and rename fields as in this API.

    Raises:
        RequestError: a RequestError, a TypeError or a ValueError was raised in the `with` block.
    """
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{place}: {_rename_fields(str(error))}") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{place}: {_rename_fields(str(error))}") from error


def _rename_fields(message: str) -> str:
    """Replace the names of fields at the beginning of a message by the names of this API."""
    fields, colon, problem = message.partition(": ")
    return renamed_fields(fields, _FIELD_NAMES) + colon + problem if colon else message
