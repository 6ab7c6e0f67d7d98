import pytest

from radixkv.gateway import vllm_engine_pb2
from radixkv.service.server.receive.response_bytes import response_bytes, unsent_bytes
from radixkv.v1.cache_pb2 import StatsRequest
from radixkv.v1.prefill_pb2 import GenerateRequest, PrefillRequest

PROMPT = PrefillRequest(token_ids=range(10))


def gateway_request(**sampling):
    """Return a request of the gateway with a prompt of ten tokens."""
    return vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=range(10)),
        sampling_params=vllm_engine_pb2.SamplingParams(**sampling),
    )


# Three copies of 1000 logits with 4 bytes each; or of the log probabilities of 10 tokens, with 16 bytes each.
@pytest.mark.parametrize(
    ("request_", "num_bytes"),
    [
        (PrefillRequest(return_logits=True), 3 * 4 * 1000),
        (PrefillRequest(), 0),
        (StatsRequest(), 0),
        (GenerateRequest(prefill=PROMPT, prompt_logprobs=0), 3 * 16 * 10),
        (GenerateRequest(prefill=PROMPT, prompt_logprobs=4, logprobs=9), 3 * 16 * 10 * 5),
        (GenerateRequest(prefill=PROMPT, logprobs=4), 0),
        (GenerateRequest(prefill=PROMPT, prompt_logprobs=2**32 - 1), 3 * 16 * 10 * 101),
        (gateway_request(prompt_logprobs=4), 3 * 16 * 10 * 5),
        (gateway_request(prompt_logprobs=-1), 3 * 16 * 10),
        (gateway_request(logprobs=4), 0),
    ],
)
def test_requested_logits_and_log_probabilities_of_the_prompt_count_before_they_exist_and_generated_tokens_do_not(
    request_, num_bytes
):
    assert response_bytes(request_, 1000) == num_bytes


def test_a_generated_token_takes_as_much_as_one_more_log_probability():
    assert unsent_bytes(7, 0) == 3 * 16 * 7
    assert unsent_bytes(7, 101) == 3 * 16 * 7 * 102
