"""The fields of the requests of the gateway: defaults that differ from radixkv's, and refusals that name the field."""

import numpy as np
import pytest

from radixkv.api.caller import Caller
from radixkv.errors import InvalidRequest
from radixkv.gateway.vllm_engine_pb2 import (
    ChoiceConstraint,
    GenerateRequest,
    KvTransferParams,
    MediaRefs,
    MultimodalInputs,
    SamplingParams,
    TokenizedInput,
)
from radixkv.service.server.gateway.requests import read_generation
from radixkv.service.structured.grammar_text import GrammarText
from tests.service.fake_engine import LIMITS

PROMPT = TokenizedInput(original_text="ignored", input_ids=[1, 2, 300])


def generation_of(sampling=None, tenant="ten", **fields):
    fields.setdefault("tokenized", PROMPT)
    request = GenerateRequest(request_id="req", sampling_params=SamplingParams(**sampling or {}), **fields)
    return read_generation(GenerateRequest.FromString(request.SerializeToString()), LIMITS, tenant, None, "span")


def sampling_of(**fields):
    return generation_of(fields).sampling


def test_the_prompt_belongs_to_the_gateways_tenant():
    params = generation_of().params
    assert np.frombuffer(params.tokens, "<u4").tolist() == [1, 2, 300]
    assert params.caller == Caller("ten")
    assert (params.request_id, params.traceparent, params.deadline_s) == ("req", "span", None)
    assert (params.read_cache, params.write_cache) == (True, True)


def test_a_request_without_an_id_gets_one():
    ids = [read_generation(GenerateRequest(tokenized=PROMPT), LIMITS, "", None, "").params.request_id for _ in range(2)]
    assert all(ids)
    assert ids[0] != ids[1]


def test_every_option_is_read():
    sampling = sampling_of(
        temperature=0.5,
        top_p=0.25,
        top_k=9,
        min_p=0.125,
        frequency_penalty=0.75,
        presence_penalty=-0.5,
        repetition_penalty=1.5,
        max_tokens=40,
        min_tokens=4,
        stop_token_ids=[8, 7, 8],
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=0,
        seed=17,
        logit_bias={8: -1.5, 3: 2.0},
    )
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 9, 0.125)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.75, -0.5, 1.5)
    assert (sampling.max_new_tokens, sampling.min_tokens, sampling.ignore_eos) == (40, 4, True)
    assert (sampling.stop_token_ids, sampling.logprobs, sampling.seed) == (frozenset({7, 8}), 3, 17)
    assert sampling.logit_bias == ((3, 2.0), (8, -1.5))
    assert sampling.prompt_logprobs == 0


def test_an_absent_temperature_is_one_and_zero_means_greedy_decoding():
    assert sampling_of().temperature == 1.0
    assert sampling_of(temperature=0.0).temperature == 0.0


def test_a_top_p_or_repetition_penalty_of_zero_counts_as_absent():
    sampling = sampling_of(top_p=0.0, top_k=0, repetition_penalty=0.0)
    assert (sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 0, 1.0)
    assert sampling_of(repetition_penalty=1.0).repetition_penalty == 1.0
    sampling.validate(LIMITS.vocab_size)


@pytest.mark.parametrize(
    ("seed", "unsigned"), [(0, 0), (2**31 - 1, 2**31 - 1), (-1, 2**64 - 1), (-(2**31), 2**64 - 2**31)]
)
def test_a_signed_seed_becomes_an_unsigned_one(seed, unsigned):
    assert sampling_of(seed=seed).seed == unsigned


def test_without_a_seed_each_request_draws_its_own():
    assert sampling_of().seed != sampling_of().seed


def test_without_a_length_the_answer_is_as_long_as_fits():
    num_prompt_tokens = len(PROMPT.input_ids)
    assert sampling_of().max_new_tokens == LIMITS.max_sequence_tokens - num_prompt_tokens
    # The last token of an answer is not cached, so it may exceed the ceiling.
    bounded = generation_of(tenant="bounded").sampling.max_new_tokens
    assert bounded == LIMITS.ceiling_tokens["bounded"] + 1 - num_prompt_tokens
    assert sampling_of(max_tokens=5).max_new_tokens == 5


def test_a_prompt_that_leaves_no_room_requests_one_token_so_that_the_engine_refuses_it():
    full = generation_of(tenant="bounded", tokenized=TokenizedInput(input_ids=[1] * 40))
    assert full.sampling.max_new_tokens == 1


def test_zero_logprobs_differ_from_absent_ones():
    assert sampling_of().logprobs is None
    assert sampling_of(logprobs=0).logprobs == 0


def test_n_is_the_number_of_completions_and_at_least_one():
    assert [generation_of({"n": n}).num_completions for n in (0, 1, 64)] == [1, 1, 64]


def test_stop_strings_are_read_in_order():
    assert (generation_of().stops, generation_of({"stop": ["b", "a"]}).stops) == ((), ("b", "a"))


def test_tokens_are_streamed_if_the_request_says_so():
    assert [generation_of(stream=each).is_streamed for each in (False, True)] == [False, True]


def test_neutral_values_pass():
    neutral = {
        "n": 1,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": True,
        "grammar_from_first_token": True,
    }
    assert generation_of(neutral, data_parallel_rank=0).num_completions == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", KvTransferParams()),
        ("kv_transfer_params_json", "{}"),
        ("mm_inputs", MultimodalInputs()),
        ("extra_mm_inputs", [MultimodalInputs()]),
        ("media_refs", MediaRefs()),
        ("data_parallel_rank", 1),
        ("data_parallel_rank", -1),
    ],
)
def test_requests_with_unsupported_fields_are_refused(field, value):
    with pytest.raises(InvalidRequest, match=rf"^{field}: (expected .*, got |radixkv does not support this field)"):
        generation_of(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("truncate_prompt_tokens", -1),
        ("structural_tag", "{}"),
        ("choice", ChoiceConstraint()),
        ("n", 65),
        ("max_tokens", 0),
        ("stop_token_ids", [1] * 1025),
    ],
)
def test_unsupported_sampling_fields_are_refused(field, value):
    with pytest.raises(InvalidRequest, match=rf"^{field}: (expected .*, got |radixkv does not support this field)"):
        sampling_of(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("logprobs", -1), ("logprobs", 101), ("prompt_logprobs", -1), ("min_p", 1.5), ("top_p", -0.5)]
)
def test_values_out_of_range_are_left_to_the_engine_which_names_them(field, value):
    with pytest.raises(InvalidRequest, match=rf"^{field}: (expected .*, got |radixkv does not support this field)"):
        sampling_of(**{field: value}).validate(LIMITS.vocab_size)


def test_each_kind_of_constraint_is_read_as_a_grammar():
    assert generation_of().grammar is None
    assert generation_of({"json_object": False}).grammar is None
    for kind in ("json_schema", "regex", "grammar"):
        assert generation_of({kind: "a+"}).grammar == GrammarText(kind, kind, "a+")
    assert generation_of({"json_object": True}).grammar == GrammarText.of_json_object("json_object")
    choices = ChoiceConstraint(choices=["a", "b"])
    assert generation_of({"choice": choices}).grammar == GrammarText.of_choices("choice", ["a", "b"])


def test_text_is_refused_since_the_gateway_has_the_tokenizer():
    with pytest.raises(InvalidRequest, match=r"^text: expected token ids in tokenized\.input_ids"):
        read_generation(GenerateRequest(text="hello"), LIMITS, "", None, "")


def test_a_long_request_id_is_refused():
    with pytest.raises(InvalidRequest, match=r"^request_id: expected at most 256 characters, got 257"):
        read_generation(GenerateRequest(request_id="x" * 257, tokenized=PROMPT), LIMITS, "", None, "")
