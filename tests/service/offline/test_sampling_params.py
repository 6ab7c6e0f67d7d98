from __future__ import annotations

from typing import Any

import pytest

from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest
from radixkv.service.offline.sampling_params import SamplingParams, StructuredOutputsParams
from radixkv.service.structured.grammar_text import GrammarText


def test_the_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop) == (16, 0, None, None)
    assert (params.logprobs, params.prompt_logprobs, params.ignore_eos) == (None, None, False)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.detokenize, params.skip_special_tokens, params.include_stop_str_in_output) == (True, True, False)


def test_each_field_reaches_the_engine() -> None:
    params = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=-1,
        stop_token_ids=[3, 4],
        max_tokens=9,
        min_tokens=2,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=0,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={8: 2.0, 7: -100},
    )
    assert params.sampling(6, 11) == Sampling(
        max_new_tokens=6,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=2**64 - 1,
        stop_token_ids=frozenset({3, 4}),
        min_tokens=2,
        ignore_eos=True,
        logprobs=5,
        prompt_logprobs=0,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias=((7, -100), (8, 2.0)),
    )
    assert SamplingParams().sampling(6, 11).seed == 11
    assert SamplingParams(top_k=-1).sampling(6, 11).top_k == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n: expected 1 to 64, got 0"),
        ({"n": 65}, "n: expected 1 to 64, got 65"),
        ({"n": True}, "n: expected an integer, got bool"),
        ({"n": "2"}, "n: expected an integer, got str"),
        ({"temperature": -0.1}, "temperature: expected a finite number from 0, got -0.1"),
        ({"temperature": None}, "temperature: expected a number, got NoneType"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, or None, got 0"),
        ({"max_tokens": 1.5}, "max_tokens: expected an integer or None, got float"),
        ({"min_tokens": 17}, "min_tokens: expected at most max_tokens, 16, got 17"),
        ({"top_k": -2}, "top_k: expected at least 0, got -2"),
        ({"logprobs": -1}, "logprobs: expected 0 to 100, got -1"),
        ({"stop": ""}, r"stop\[0\]: expected 1 to 256 characters, got 0"),
        ({"stop": [1]}, "stop: expected text or a list of texts, got another type"),
        ({"stop": "x", "detokenize": False}, "stop: expected it only with detokenize=True"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: expected integers, got another type"),
        ({"logit_bias": {1: 200.0}}, "logit_bias: expected -100 to 100 for token 1, got 200.0"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs: expected one of the fields json, regex, .*"),
        ({"structured_outputs": {}}, "structured_outputs: expected one of json, .*, got none"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, ".* got regex, json_object"),
        ({"structured_outputs": {"choice": "yes"}}, r"structured_outputs.choice: expected a list of texts, .*"),
        ({"structured_outputs": {"grammar": 3}}, r"structured_outputs.grammar: expected text, got another type"),
        ({"best_of": 4}, "best_of: this engine does not support it; use n, and choose by cumulative_logprob"),
        ({"guided_decoding": {}}, "guided_decoding: this engine does not support it; use structured_outputs"),
        ({"logits_processors": []}, "logits_processors: this engine does not support it; use logit_bias"),
        ({"bad_words": ["a"]}, "bad_words: this engine does not support it; use logit_bias"),
    ],
)
def test_a_wrong_value_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}$"):
        SamplingParams(**options)


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="max_token"):
        SamplingParams().max_token = 4  # type: ignore[attr-defined]


def test_an_assigned_value_is_checked_when_it_is_used() -> None:
    params = SamplingParams()
    params.max_tokens = 0
    with pytest.raises(InvalidRequest, match="max_tokens"):
        params.require_valid(512)
    params.max_tokens, params.stop_token_ids = 4, [600]
    with pytest.raises(InvalidRequest, match="stop_token_ids: expected ids from 0 to below the vocabulary size 512"):
        params.require_valid(512)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": {"type": "integer"}}, "json_schema", '{"type": "integer"}'),
        ({"json": '{"type": "integer"}'}, "json_schema", '{"type": "integer"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", 'n"o']}, "grammar", 'start: "yes" | "n\\"o"'),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"json_object": True}, "json_schema", '{"type": "object"}'),
    ],
)
def test_structured_outputs_become_a_grammar(given: dict[str, Any], kind: str, text: str) -> None:
    (name,) = given
    expected = GrammarText(f"structured_outputs.{name}", kind, text)
    for structured in (given, StructuredOutputsParams(**given)):
        outputs = SamplingParams(structured_outputs=structured).structured
        assert outputs is not None
        assert outputs.grammar_text == expected
