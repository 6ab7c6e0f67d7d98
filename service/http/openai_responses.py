"""Writes responses of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from radixkv.errors import CapacityError, InvalidCredential, PromptTooLong
from radixkv.service.http.api_errors import http_status_of, message_and_field
from radixkv.service.http.completions import CompletionChunk
from radixkv.service.text.text_stream import BROKEN
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.prefill_pb2 import TokenLogprobs, Usage

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

# OpenAI's names of errors that programs distinguish.
_ERROR_CODES = {
    InvalidCredential: "invalid_api_key",
    PromptTooLong: "context_length_exceeded",
    CapacityError: "rate_limit_exceeded",
}


def error_body(error: BaseException, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of a response to a request that failed.

    Args:
        error: the exception.
        names: the names of fields in OpenAI's API, by their names in messages of this server.
    """
    message, param = message_and_field(error, names)
    if isinstance(error, PromptTooLong):  # agents search for these words, and then shorten the conversation
        message = f"This model's maximum context length is exceeded: {message}"
    code = next((code for kind, code in _ERROR_CODES.items() if isinstance(error, kind)), None)
    return error_object(message, http_status_of(error), param, code)


def error_object(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of a response with an error.

    Args:
        message: says what was wrong.
        status: the HTTP status.
        param: the field of the request that was wrong; None if the error concerns no field.
        code: OpenAI's name of the error.
    """
    kind = _ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage_object(
    prompts: Iterable[tuple[Usage, str | None]], num_generated: int, num_reasoning: int | None = None
) -> dict[str, Any]:
    """Return the usage of a request.

    Args:
        prompts: the usage of each prompt, and why no more of it was cached; None if all but its last token was.
        num_generated: tokens of all completions.
        num_reasoning: how many of these tokens are reasoning; None if the model does not reason.
    """
    prompts = list(prompts)
    usages = [usage for usage, _ in prompts]
    num_prompt = sum(usage.prompt_tokens for usage in usages)
    reasons = list(dict.fromkeys(reason for _, reason in prompts if reason is not None))
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "cache_write_tokens": sum(usage.written_tokens for usage in usages),
            "cached_by_tier": cached_by_tier(usages),
            "miss_reason": ", ".join(reasons) or None,
        },
    }
    if num_reasoning is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return usage


def cached_by_tier(usages: Sequence[Usage]) -> dict[str, int]:
    """Return the number of cached tokens by the tier where they were stored."""
    return {
        "device": sum(each.device_tokens for each in usages),
        "host": sum(each.host_tokens for each in usages),
        "disk": sum(each.disk_tokens for each in usages),
        "remote": sum(each.remote_tokens for each in usages),
    }


def finish_reason(chunk: CompletionChunk) -> str | None:
    """Return why a completion ended; None if it has not."""
    if not chunk.is_last:
        return None
    return "length" if chunk.has_reached_length else "stop"


def chat_logprobs(rows: Iterable[tuple[int, TokenLogprobs]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return log probabilities in the form of a chat completion, for the ids and log probabilities of tokens."""
    content = [
        {
            **_chat_logprob(token_id, row.logprob, tokenizer),
            "top_logprobs": [_chat_logprob(each.token_id, each.logprob, tokenizer) for each in row.top],
        }
        for token_id, row in rows
    ]
    return {"content": content, "refusal": None}


def _chat_logprob(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(tokenizer.token_bytes(token_id))}


def completion_logprobs(
    rows: Sequence[tuple[int, TokenLogprobs]], tokenizer: Tokenizer, first_offset: int
) -> dict[str, Any]:
    """Return the log probabilities of tokens in the form of a completion.

    Args:
        rows: the id and the log probabilities of each token.
        tokenizer: tokenizer of the model.
        first_offset: characters of the completion before these tokens.
    """
    texts = [_token_text(token_id, tokenizer) for token_id, _ in rows]
    offsets = []
    offset = first_offset
    for token_id, _ in rows:
        offsets.append(offset)
        offset += len(tokenizer.token_text(token_id))
    return {
        "tokens": texts,
        "token_logprobs": [row.logprob for _, row in rows],
        "top_logprobs": [{_token_text(each.token_id, tokenizer): each.logprob for each in row.top} for _, row in rows],
        "text_offset": offsets,
    }


def _token_text(token_id: int, tokenizer: Tokenizer) -> str:
    r"""Return the text of a token; for a part of a character, its bytes in OpenAI's form, such as `bytes:\xe2`."""
    text = tokenizer.token_text(token_id)
    if BROKEN not in text:
        return text
    return "bytes:" + "".join(f"\\x{each:02x}" for each in tokenizer.token_bytes(token_id))
