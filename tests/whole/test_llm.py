"""`LLM` with the embedded model: the completions of the service, the same bits in every batch, and prefix reuse."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from bench.training.tokenizer import load_tokenizer
from radixkv import LLM, Client, RequestOutput, SamplingParams
from radixkv.cache.purge import Purged
from radixkv.errors import (
    ConfigError,
    InvalidRequest,
    LifecycleError,
    PromptTooLong,
    StoreUnavailable,
    UnknownAdapter,
)
from radixkv.model.tiny_model import build_tiny_model
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.prefill_pb2 import GenerateResponse
from tests.model.adapters.made_by_peft import load_adapted, write_adapter
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.started_threads import started_threads
from tests.whole.forked_server import serving

PROMPTS = ["And the Lord said unto Moses,", "Once upon a time there was a king", "What is", "In the beginning God"]
CHAT = [{"role": "user", "content": "Where is my father?"}]
IM_START, IM_END = 510, 511  # around a turn; the embedded model ends its answers with the second
MAX_DIFFERENCE = 1e-3  # of log probabilities to those of transformers; tokens of adjacent ranks differ by much more
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", capacity_tokens=65_536, block_size=16) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _empty_cache(request: pytest.FixtureRequest) -> None:
    if "llm" in request.fixturenames:
        assert request.getfixturevalue("llm").reset_prefix_cache()


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving("--set", "cache.block_size=16") as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    return llm.get_tokenizer()


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return build_tiny_model("eager").eval()


def logprobs_of(oracle: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Return the log probabilities of all tokens after each token, by transformers, float32 `[num_tokens, 512]`."""
    with torch.inference_mode():
        return oracle(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def complete_over_grpc(client: Client, prompt: list[int], n: int = 1, **options: object) -> list[tuple[list[int], str]]:
    """Return the tokens of each of the service's completions, and the stop string that ended it."""
    chunks: list[GenerateResponse] = list(client.generate(prompt, n=n, **options))  # type: ignore[arg-type]
    completions = []
    for index in range(n):
        chunks_of_completion = [chunk for chunk in chunks if chunk.index == index]
        token_ids = [token_id for chunk in chunks_of_completion for token_id in chunk.token_ids]
        completions.append((token_ids, chunks_of_completion[-1].matched_stop))
    return completions


def num_generated_tokens(llm: LLM) -> int:
    """Return the number of tokens that the engine has generated."""
    assert llm._engine is not None
    return llm._engine.stats().result(PATIENCE_S).tokens.generated


def comparable(outputs: list[RequestOutput]) -> list[object]:
    """Return everything about outputs that must not depend on the batch."""
    return [
        (
            output.prompt,
            [(each.token_ids, each.text, each.cumulative_logprob, each.logprobs) for each in output.outputs],
        )
        for output in outputs
    ]


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.3, "top_p": 0.9, "seed": 7}])
def test_completions_are_those_of_the_service(
    llm: LLM, client: Client, tokenizer: Tokenizer, options: dict[str, float]
) -> None:
    outputs = llm.generate(PROMPTS, SamplingParams(n=3, max_tokens=40, **options))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer.encode(prompt)
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompt, ids, True)
        expected = [token_ids for token_ids, _ in complete_over_grpc(client, ids, n=3, max_new_tokens=40, **options)]
        assert [each.token_ids for each in output.outputs] == expected
        assert [each.text for each in output.outputs] == [tokenizer.decode(each) for each in expected]
        assert [each.index for each in output.outputs] == [0, 1, 2]
        assert {each.finish_reason for each in output.outputs} <= {"length", "stop"}


def test_a_batch_changes_no_bit(llm: LLM) -> None:
    parameters = [
        SamplingParams(max_tokens=24, seed=seed, logprobs=3, temperature=temperature, n=2)
        for seed, temperature in enumerate((0.0, 0.7, 1.0, 1.5))
    ]
    cold_batch = llm.generate(PROMPTS, parameters)
    warm_batch = llm.generate(PROMPTS, parameters)
    llm.reset_prefix_cache()
    cold_single_calls = [llm.generate(prompt, each)[0] for prompt, each in zip(PROMPTS, parameters, strict=True)]
    assert comparable(cold_batch) == comparable(cold_single_calls) == comparable(warm_batch)
    logits = [each.logits for each in llm.prefill(PROMPTS)]
    llm.reset_prefix_cache()
    for prompt, expected in zip(PROMPTS, logits, strict=True):
        (cold,) = llm.prefill(prompt)
        assert cold.logits.dtype == np.float32
        assert cold.logits.tobytes() == expected.tobytes()
        assert cold.num_cached_tokens == 0


def test_the_second_call_reuses_all_but_the_last_token(llm: LLM) -> None:
    first, second = (llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, temperature=0))[0] for _ in range(2))
    assert (first.num_cached_tokens, first.miss_reason) == (0, "COLD")
    assert (second.num_cached_tokens, second.miss_reason) == (len(second.prompt_token_ids) - 1, "NONE")
    assert second.outputs == first.outputs
    assert int(second.request_id) == int(first.request_id) + 1
    unread = llm.generate(PROMPTS[0], SamplingParams(max_tokens=4, temperature=0, skip_reading_prefix_cache=True))[0]
    assert (unread.num_cached_tokens, unread.outputs) == (0, first.outputs)
    assert llm.generate({"prompt": PROMPTS[0], "cache_salt": "mine"})[0].num_cached_tokens == 0


def test_the_seed_makes_completions_without_seeds_reproducible(llm: LLM) -> None:
    sampled_texts = [llm.generate("Once", SamplingParams(max_tokens=12))[0].outputs[0].text for _ in range(3)]
    assert len(set(sampled_texts)) == 3
    settings = {"capacity_tokens": 4096, "block_size": 16}
    texts_by_llm = []
    for seed in (5, 5, 6):
        with LLM("tiny", seed=seed, **settings) as seeded_llm:
            texts_by_llm.append([each.outputs[0].text for each in seeded_llm.generate(["Once", "Once"])])
    assert texts_by_llm[0] == texts_by_llm[1] != texts_by_llm[2]
    assert texts_by_llm[0][0] != texts_by_llm[0][1]


def test_a_stop_string_ends_a_completion(llm: LLM, client: Client, tokenizer: Tokenizer) -> None:
    (whole,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=60, temperature=0))[0].outputs
    stop = whole.text[30:33]
    parameters = SamplingParams(max_tokens=3000, temperature=0, stop=[stop, "never there"], logprobs=0)
    num_generated_before = num_generated_tokens(llm)
    (cut,) = llm.generate(PROMPTS[0], parameters)[0].outputs
    assert num_generated_tokens(llm) - num_generated_before < 1000, "the engine ends the generation at the stop string"
    ((expected, matched),) = complete_over_grpc(client, tokenizer.encode(PROMPTS[0]), max_new_tokens=60, stop=[stop])
    assert (cut.token_ids, cut.stop_reason, cut.finish_reason) == (expected, matched, "stop")
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.logprobs is not None
    assert [next(iter(each)) for each in cut.logprobs] == cut.token_ids
    parameters.include_stop_str_in_output = True
    assert llm.generate(PROMPTS[0], parameters)[0].outputs[0].text == cut.text + stop


def test_a_stop_token_has_no_text_unless_requested(llm: LLM, tokenizer: Tokenizer) -> None:
    (whole,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=30, temperature=0))[0].outputs
    stop_id = whole.token_ids[9]
    num_tokens_before_stop = whole.token_ids.index(stop_id)
    parameters = SamplingParams(max_tokens=30, temperature=0, stop_token_ids=[stop_id])
    (cut,) = llm.generate(PROMPTS[0], parameters)[0].outputs
    expected_ids = whole.token_ids[: num_tokens_before_stop + 1]
    assert (cut.token_ids, cut.stop_reason, cut.finish_reason) == (expected_ids, stop_id, "stop")
    assert cut.text == tokenizer.decode(expected_ids[:-1])
    parameters.include_stop_str_in_output = True
    assert llm.generate(PROMPTS[0], parameters)[0].outputs[0].text == tokenizer.decode(expected_ids)


def test_the_models_end_of_sequence_token_is_no_stop_reason(llm: LLM) -> None:
    parameters = SamplingParams(max_tokens=30, temperature=0, logit_bias={IM_END: 100.0})
    (ended,) = llm.chat(CHAT, parameters)[0].outputs
    assert (ended.token_ids, ended.text) == ([IM_END], "")
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    parameters.ignore_eos, parameters.stop_token_ids = True, [IM_END]
    assert llm.chat(CHAT, parameters)[0].outputs[0].stop_reason == IM_END
    parameters.stop_token_ids, parameters.max_tokens = None, 3
    (continued,) = llm.chat(CHAT, parameters)[0].outputs
    assert (continued.token_ids, continued.finish_reason) == ([IM_END] * 3, "length")


def test_special_tokens_have_a_text_if_requested(llm: LLM) -> None:
    biased = dict.fromkeys((IM_END, IM_START, 97, 300), 100.0)
    options = {"max_tokens": 30, "seed": 2, "temperature": 30.0, "top_k": 4, "logit_bias": biased, "ignore_eos": True}
    (hidden,) = llm.generate(PROMPTS[0], SamplingParams(**options))[0].outputs
    (shown,) = llm.generate(PROMPTS[0], SamplingParams(**options, skip_special_tokens=False))[0].outputs
    assert set(shown.token_ids) == biased.keys()
    assert hidden.text == load_tokenizer().decode(shown.token_ids, skip_special_tokens=True)
    assert shown.text == load_tokenizer().decode(shown.token_ids, skip_special_tokens=False)
    stopping = SamplingParams(**options, skip_special_tokens=False, stop="<|im_start|>")
    assert llm.generate(PROMPTS[0], stopping)[0].outputs[0].text == shown.text[: shown.text.index("<|im_start|>")]
    assert llm.generate(PROMPTS[0], SamplingParams(**options, detokenize=False))[0].outputs[0].text == ""


def test_log_probabilities_are_those_of_transformers(llm: LLM, oracle: LlamaForCausalLM) -> None:
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=3, logprobs=2, prompt_logprobs=1))
    ids = output.prompt_token_ids
    (completion,) = output.outputs
    expected = logprobs_of(oracle, ids + completion.token_ids)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert completion.logprobs is not None
    rows = [*output.prompt_logprobs[1:], *completion.logprobs]
    for position, (token_id, row) in enumerate(zip([*ids[1:], *completion.token_ids], rows, strict=True)):
        assert row is not None
        assert next(iter(row)) == token_id
        num_top = 1 if position < len(ids) - 1 else 2  # as requested for tokens of the prompt and of the completion
        for row_token_id, actual in row.items():
            rank = 1 + int((expected[position] > expected[position, row_token_id]).sum())
            assert actual.rank == (rank if rank <= num_top else None)
            assert actual.logprob == pytest.approx(expected[position, row_token_id].item(), abs=MAX_DIFFERENCE)
        most_likely = int(expected[position].argmax())
        assert row[most_likely].rank == 1
        assert row[most_likely].decoded_token == llm.get_tokenizer().token_text(most_likely)
    chosen_logprobs = [
        row[token_id].logprob for token_id, row in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    assert completion.cumulative_logprob == pytest.approx(sum(chosen_logprobs))


def test_scores_are_those_of_transformers_and_the_context_is_computed_once(
    llm: LLM, oracle: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    context = "And it came to pass, that the Lord said unto "
    continuations = ["Moses, Speak", "the king", "x", "Jacob, Go up into the mountain"]
    scores = llm.score(context, continuations)
    num_context_tokens = len(tokenizer.encode(context.rstrip()))  # the space belongs to the first continuation token
    for continuation, score in zip(continuations, scores, strict=True):
        ids = tokenizer.encode(context + continuation)
        continuation_ids = ids[num_context_tokens:]
        rows = logprobs_of(oracle, ids)[num_context_tokens - 1 : -1]
        expected = rows[range(len(rows)), continuation_ids]
        assert score.token_ids == continuation_ids
        assert score.logprob == pytest.approx(expected.sum().item(), abs=MAX_DIFFERENCE)
        assert score.token_logprobs == pytest.approx(expected.tolist(), abs=MAX_DIFFERENCE)
        assert score.is_greedy == bool((rows.argmax(-1) == torch.tensor(score.token_ids)).all())
    assert sorted(each.num_cached_tokens for each in scores) == [0, *[num_context_tokens - 1] * 3]
    prefilled = llm.prefill(context + "Moses, Speak")[0]
    assert prefilled.num_cached_tokens == num_context_tokens, "continuations are not cached"


def test_the_greedy_continuation_is_recognized(llm: LLM) -> None:
    prompt = llm.prefill(PROMPTS[0])[0].prompt_token_ids
    (greedy,) = llm.generate([prompt], SamplingParams(max_tokens=5, temperature=0, logprobs=0))[0].outputs
    not_greedy = [*greedy.token_ids[:4], (greedy.token_ids[4] + 1) % 512]
    scores = llm.score([prompt], [greedy.token_ids, not_greedy])
    assert [each.is_greedy for each in scores] == [True, False]
    assert scores[0].logprob == greedy.cumulative_logprob
    assert llm.score([prompt, prompt + greedy.token_ids[:2]], [greedy.token_ids, greedy.token_ids[2:]])[1].is_greedy
    assert llm.score(prompt, [[IM_END, 5]])[0].token_ids == [IM_END, 5], (
        "an end-of-sequence token does not end a continuation"
    )


def test_a_prefill_returns_the_logits_of_the_service(llm: LLM, client: Client, oracle: LlamaForCausalLM) -> None:
    outputs = llm.prefill([PROMPTS[0], [1, 2, 3]], top_logprobs=4)
    for output in outputs:
        expected = client.prefill(output.prompt_token_ids, tenant="prefill", top_logprobs=4, return_logits=True)
        assert output.logits.tobytes() == expected.logits
        assert output.next_token_id == expected.next_token_id == int(output.logits.argmax())
        assert [token_id for token_id, _ in output.top_logprobs] == [each.token_id for each in expected.top_logprobs]
        assert output.usage.computed_tokens == len(output.prompt_token_ids) == expected.usage.computed_tokens
        assert output.miss_reason == "COLD"
        logprobs = torch.tensor(output.logits).log_softmax(-1)
        assert (logprobs - logprobs_of(oracle, output.prompt_token_ids)[-1]).abs().max() < MAX_DIFFERENCE
    assert [each.prompt for each in outputs] == [PROMPTS[0], None]


def test_a_chat_has_the_answer_of_the_service(llm: LLM, client: Client) -> None:
    chat_with_system = [{"role": "system", "content": "Be brief."}, *CHAT]
    outputs = llm.chat([CHAT, chat_with_system], SamplingParams(max_tokens=24, temperature=0))
    for conversation, output in zip((CHAT, chat_with_system), outputs, strict=True):
        assert output.outputs[0].text == client.chat(conversation, max_new_tokens=24).read()
        assert output.prompt is not None
        assert output.prompt.endswith("<|im_start|>assistant\n")
    assert llm.chat(CHAT, SamplingParams(max_tokens=24, temperature=0))[0].outputs == outputs[0].outputs
    prompt = llm.chat(CHAT, add_generation_prompt=False)[0].prompt
    assert prompt is not None
    assert prompt.endswith("<|im_end|>\n")
    with pytest.raises(InvalidRequest, match=r"^conversations\[0\]: tools: the model's chat template drops tools"):
        llm.chat([CHAT, CHAT], tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(InvalidRequest, match=r"^conversations\[0\]: .*thinking"):
        llm.chat(CHAT, chat_template_kwargs={"enable_thinking": True})


def test_structured_outputs_are_followed(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "x-guidance": {"whitespace_flexible": False},
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
        "additionalProperties": False,
    }
    parameters = [
        SamplingParams(max_tokens=40, n=3, seed=1, structured_outputs=each)
        for each in ({"json": schema}, {"regex": "[a-f]{4}"}, {"choice": ["yes", "no"]}, {"grammar": 'start: "a" "b"'})
    ]
    outputs = llm.generate(["Hello"] * 4, parameters)
    objects, words, choices, sentences = ([each.text for each in output.outputs] for output in outputs)
    assert all(0 <= json.loads(text)["age"] <= 99 for text in objects)
    assert all(re.fullmatch("[a-f]{4}", text) for text in words)
    assert set(choices) <= {"yes", "no"}
    assert sentences == ["ab"] * 3

    async def generate_in_event_loop() -> str:  # as in a notebook
        return llm.generate("Hello", SamplingParams(structured_outputs={"choice": ["maybe"]}))[0].outputs[0].text

    assert asyncio.run(generate_in_event_loop()) == "maybe"
    with pytest.raises(InvalidRequest, match=r"^prompts\[1\]: structured_outputs.regex: .*"):
        llm.generate(["Hello", "Hello"], [SamplingParams(), SamplingParams(structured_outputs={"regex": "("})])


def test_a_wrong_prompt_is_refused_before_any_is_computed(llm: LLM) -> None:
    too_long = [1] * 70_000
    with pytest.raises(
        PromptTooLong, match=r"^prompts\[1\]: prompt_token_ids: expected at most 65536 tokens, got 70000"
    ):
        llm.generate([PROMPTS[0], too_long])
    with pytest.raises(InvalidRequest, match=r"^prompts\[2\]: prompt_token_ids\[1\]: expected an id below .* 512"):
        llm.prefill([PROMPTS[0], PROMPTS[1], [1, 512]])
    with pytest.raises(InvalidRequest, match=r"^continuations\[1\]: prompt_token_ids: expected at least 1 token"):
        llm.score(PROMPTS[0], ["a", ""])
    with pytest.raises(UnknownAdapter, match=r"^prompts\[0\]: adapter: "):
        llm.generate(PROMPTS, adapter="unknown")
    with pytest.raises(InvalidRequest, match="sampling_params: expected one, or one for each of 4 prompts, got 2"):
        llm.generate(PROMPTS, [SamplingParams()] * 2)
    with pytest.raises(InvalidRequest, match="contexts: expected one, or one for each of 3 continuations, got 2"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(TypeError, match="lora_request"):
        llm.generate(PROMPTS, lora_request=None)  # type: ignore[call-arg]
    assert [each.num_cached_tokens for each in llm.prefill(PROMPTS)] == [0] * 4
    assert llm.generate([]) == llm.prefill([]) == llm.chat([]) == []
    with pytest.raises(InvalidRequest, match=r"^conversations\[1\]: "):
        llm.chat([CHAT, []])


def test_calls_of_several_threads_get_their_own_results(llm: LLM) -> None:
    parameters = SamplingParams(max_tokens=12, temperature=0, logprobs=1)
    expected = comparable(llm.generate(PROMPTS, parameters))
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: comparable(llm.generate(PROMPTS, parameters)), range(8)))
    assert results == [expected] * 8


def test_a_call_may_have_more_prompts_than_requests_may_be_unfinished() -> None:
    with LLM("tiny", capacity_tokens=4096, block_size=16, max_running_requests=2, max_tenant_requests=3) as llm:
        outputs = llm.generate([[each] for each in range(40)], SamplingParams(max_tokens=2, n=2))
        assert [each.prompt_token_ids for each in outputs] == [[each] for each in range(40)]

        def generate(first: int) -> list[list[int]]:
            outputs = llm.generate([[first, each] for each in range(5)], SamplingParams(max_tokens=2))
            return [each.prompt_token_ids for each in outputs]

        with ThreadPoolExecutor(6) as threads:  # more calls than requests that may be unfinished
            assert list(threads.map(generate, range(6))) == [[[first, each] for each in range(5)] for first in range(6)]


def test_completions_end_when_the_pool_is_full_and_close_ends_all_threads() -> None:
    started = started_threads()
    llm = LLM("tiny", capacity_tokens=256, block_size=16)
    assert [len(started(name)) for name in ("radixkv-engine", "radixkv-watchdog")] == [1, 1]
    for max_tokens in (None, 10**6):
        parameters = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        (output,) = llm.generate([[1] * 200], parameters)
        max_sequence_tokens = 256 - 16  # the pool without the one block that a request cannot use
        assert len(output.outputs[0].token_ids) == max_sequence_tokens - 200
        assert output.outputs[0].finish_reason == "length"
    with pytest.raises(PromptTooLong, match=r"^prompts\[0\]: .* expected at most 240 tokens"):
        llm.generate([[1] * 240])
    llm.close()
    llm.close()
    wait_until(lambda: not any(started(name) for name in ("radixkv-engine", "radixkv-watchdog")))
    with pytest.raises(LifecycleError, match="LLM: it was closed"):
        llm.generate("Hello")


@pytest.mark.parametrize("seed", [[1], "0", 1.5, True])
def test_a_wrong_seed_is_refused_before_any_thread_is_started(seed: Any) -> None:
    started = started_threads()
    with pytest.raises(ConfigError, match=r"^LLM: seed: expected an integer or None, got "):
        LLM("tiny", capacity_tokens=256, block_size=16, seed=seed)
    assert not any(started(name) for name in ("radixkv-engine", "radixkv-watchdog"))


def test_an_adapter_of_another_model_leaves_no_threads_and_no_open_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = write_adapter(write_checkpoint(CONFIGS["llama"], tmp_path / "llama"), tmp_path / "law", seed=1)
    settings = ["tiers.host_bytes=10000000", "tiers.disk_bytes=10000000", f"tiers.disk_path={tmp_path / 'disk'}"]
    started = started_threads()
    for _ in range(2):  # the second attempt opens the same directory
        with pytest.raises(ConfigError, match=r"^adapters\.law\.path: "):
            LLM("tiny", capacity_tokens=1024, block_size=16, adapters={"law": adapter}, settings=settings)
    tier_threads = ("host-read-0", "host-write-0", "disk-read-0", "disk-write-0", "store-timers")
    wait_until(lambda: not any(started(name) for name in tier_threads))
    assert "another process uses this directory" not in caplog.text


def test_a_purge_that_a_tier_does_not_confirm_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    purged: Future[Purged] = Future()
    monkeypatch.setattr(llm._engine, "purge", lambda: purged)
    purged.set_result(Purged(3, 0, {"host": 2, "redis": None}))
    with pytest.raises(StoreUnavailable, match=r"^tiers: expected redis to delete the cached blocks"):
        llm.reset_prefix_cache()
    purged = Future()
    purged.cancel()
    with pytest.raises(LifecycleError):
        llm.reset_prefix_cache()


def test_close_cancels_calls_of_other_threads() -> None:
    llm = LLM("tiny", capacity_tokens=65_536, block_size=16)
    parameters = SamplingParams(max_tokens=60_000, ignore_eos=True)
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(llm.generate, "Hello", parameters)
        engine = llm._engine
        assert engine is not None
        wait_until(lambda: engine.load().result(PATIENCE_S).requests.running == 1)
        llm.close()
        with pytest.raises(LifecycleError, match="stopped"):
            running.result(PATIENCE_S)


def test_a_model_without_a_tokenizer_takes_token_ids_and_adapters(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(CONFIGS["llama"], tmp_path / "llama")
    adapter = write_adapter(checkpoint, tmp_path / "law", seed=1)
    ids = list(range(5, 25))
    with LLM(checkpoint, adapters={"law": adapter}, capacity_tokens=1024, block_size=16) as llm:
        for options in ({}, {"adapter": "law"}):
            (output,) = llm.generate(
                [ids], SamplingParams(max_tokens=4, temperature=0, detokenize=False, logprobs=1), **options
            )
            assert output.outputs[0].text == ""
            assert output.num_cached_tokens == 0
            assert llm.prefill([ids], **options)[0].num_cached_tokens == len(ids) - 1
        adapted = load_adapted(checkpoint, adapter)
        with torch.inference_mode():
            expected = adapted(torch.tensor([ids]), use_cache=False).logits[0, -1]
        assert int(expected.argmax()) == output.outputs[0].token_ids[0]
        assert llm.prefill([ids], adapter="law")[0].logits == pytest.approx(expected.numpy(), abs=MAX_DIFFERENCE)
        with pytest.raises(InvalidRequest, match=r"^prompts\[0\]: text requires a tokenizer, which the model does not"):
            llm.generate("Hello")
        with pytest.raises(InvalidRequest, match=r"^prompts\[0\]: text requires a tokenizer"):
            llm.generate([ids])  # without `detokenize=False`, the completion has a text


def test_a_model_that_does_not_exist_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(
        ConfigError, match=r"model.path: expected `tiny`, a directory with a config.json, .*, got nothing"
    ):
        LLM("nothing")


def test_a_script_for_vllm_runs_with_another_import() -> None:
    script = """
from radixkv import LLM, SamplingParams
prompts = ["Hello, my name is", "The president of the United States is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model="tiny", tensor_parallel_size=1)
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"{prompt!r} {len(generated_text) > 0}")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "'Hello, my name is' True\n'The president of the United States is' True\n"
    assert (done.returncode, done.stderr) == (0, ""), "the process ends although `close` was not called"


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import radixkv", ("torch", "transformers", "grpc", "numpy", "google.protobuf", "asyncio")),
        ("from radixkv import LLM, SamplingParams", ("torch", "transformers", "grpc", "tokenizers", "tqdm")),
        ("from radixkv.integrations.evaluation import Evaluator", ("torch", "transformers", "lm_eval")),
    ],
)
def test_an_import_stays_light(statement: str, unwanted: tuple[str, ...]) -> None:
    program = f"import sys\n{statement}\nprint([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def count_python_calls(llm: LLM, num_prompts: int, params: SamplingParams) -> int:
    """Complete prompts, and return how many Python functions are called on this thread meanwhile."""
    num_calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    prompts = [[index + 3, 5, 6, 7] * 4 for index in range(num_prompts)]
    sys.setprofile(count)
    try:
        llm.generate(prompts, params)
    finally:
        sys.setprofile(None)
    return num_calls


def test_the_calls_on_the_callers_thread_grow_with_prompts_and_hardly_with_tokens(llm: LLM) -> None:
    count_python_calls(llm, 1, SamplingParams())  # loads what later calls do not load again

    def count_calls(max_tokens: int, **options: bool) -> int:
        return count_python_calls(llm, 8, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options))

    assert count_calls(1, detokenize=False) < 8 * 250, "fewer than 250 calls per prompt"
    num_more_calls = count_calls(65, detokenize=False) - count_calls(1, detokenize=False)
    assert num_more_calls < 8 * 4, "without text, no call per token"
    num_more_calls = count_calls(65) - count_calls(1)
    assert num_more_calls < 8 * 64 * 10, "with text, about 7 calls per token"


def test_the_help_of_the_package_begins_with_offline_use() -> None:
    program = (
        "import radixkv; print(radixkv.__doc__.index('LLM(') < radixkv.__doc__.index('Client('), *radixkv.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["True", "LLM"]
