from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixkv.errors import InvalidRequest, PromptTooLong
from radixkv.service.offline.prompts import PreparedPrompt, error_place, prepare_pair, prompt_list
from radixkv.service.text.tokenizer import Tokenizer
from tests.service.text.tokenizers import write_tiny


def no_tokenizer() -> Tokenizer:
    raise InvalidRequest("text requires a tokenizer")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("prompts", "num_prompts"),
    [
        ("text", 1),
        ([1, 2, 3], 1),
        (np.array([1, 2, 3]), 1),
        ({"prompt": "text"}, 1),
        ([], 0),
        (["a", "b"], 2),
        ([[1], [2, 3]], 2),
        (["a", [1], {"prompt_token_ids": [2]}], 3),
        (np.array([[1, 2], [3, 4]]), 2),
    ],
)
def test_a_single_prompt_becomes_a_list(prompts: Any, num_prompts: int) -> None:
    assert len(prompt_list(prompts)) == num_prompts


def test_other_types_are_refused_as_prompts() -> None:
    with pytest.raises(InvalidRequest, match="prompts: expected a prompt or a list of prompts, got int"):
        prompt_list(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", [[1, 258], (1, 258), np.array([1, 258]), {"prompt_token_ids": [1, 258], "cache_salt": None}]
)
def test_token_ids_need_no_tokenizer(prompt: object) -> None:
    assert PreparedPrompt.of(prompt, no_tokenizer) == PreparedPrompt(None, b"\1\0\0\0\2\1\0\0")


def test_a_mapping_has_text_ids_and_a_salt(tokenizer: Tokenizer) -> None:
    prompt = PreparedPrompt.of({"prompt": "Hello", "cache_salt": "mine"}, lambda: tokenizer)
    assert (prompt.text, prompt.token_ids, prompt.salt) == ("Hello", tokenizer.encode("Hello"), "mine")
    both = PreparedPrompt.of({"prompt": "Hello", "prompt_token_ids": [1]}, no_tokenizer)
    assert (both.text, both.token_ids, both.salt) == ("Hello", [1], "")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3.5, "prompts.2.: expected text, token ids, or a mapping with either, got float"),
        (["a"], "prompts.2.: prompt_token_ids: expected integers, got <U1"),
        ([1, -1], "prompts.2.: prompt_token_ids: expected 0 to 4294967295, got -1"),
        ("text", "prompts.2.: text requires a tokenizer"),
        ({}, "prompts.2.: expected the key prompt or prompt_token_ids, got neither"),
        ({"prompt": "a", "multi_modal_data": {}}, "prompts.2.: multi_modal_data: expected one of the keys .*"),
        ({"prompt": 3}, "prompts.2.: prompt, cache_salt: expected text, got another type"),
    ],
)
def test_a_wrong_prompt_is_refused_by_its_index(prompt: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}$"), error_place("prompts[2]"):
        PreparedPrompt.of(prompt, no_tokenizer)


def test_messages_of_the_engine_get_the_names_of_this_api() -> None:
    with pytest.raises(PromptTooLong, match=r"^p: prompt_token_ids, max_tokens: expected less$"), error_place("p"):
        raise PromptTooLong("prefill.token_ids, max_new_tokens: expected less")
    with pytest.raises(InvalidRequest, match=r"^p: prompt_token_ids\[3\]: expected less$"), error_place("p"):
        raise InvalidRequest("token_ids[3]: expected less")


def test_texts_of_a_pair_are_encoded_together(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("And the Lord said unto Moses")
    context, continuation = prepare_pair("And the Lord said unto ", "Moses", lambda: tokenizer)
    assert context.token_ids + continuation.token_ids == whole
    assert context.token_ids == tokenizer.encode("And the Lord said unto"), "the space belongs to the continuation"


def test_a_pair_may_have_token_ids(tokenizer: Tokenizer) -> None:
    context, continuation = prepare_pair([1, 2], "Moses", lambda: tokenizer)
    assert (context.token_ids, continuation.token_ids) == ([1, 2], tokenizer.encode("Moses"))
    context, continuation = prepare_pair("Moses", [1, 2], lambda: tokenizer)
    assert (context.token_ids, continuation.token_ids) == (tokenizer.encode("Moses"), [1, 2])
