"""`Evaluator` over the embedded model, compared with what transformers computes for the same texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from radixkv import LLM, SamplingParams
from radixkv.errors import InvalidRequest
from radixkv.integrations.evaluation import Evaluator
from radixkv.model.tiny_model import build_tiny_model
from radixkv.service.text.tokenizer import Tokenizer
from tests.service.text.tokenizers import write_llama2_like

MAX_DIFFERENCE = 1e-3  # of log probabilities
SHOTS = "".join(f"Q: Who said the words {each}?\nA: Moses\n\n" for each in ("one", "two", "three", "four", "five"))
QUESTIONS = [f"Q: Who went to the {each}?\nA:" for each in ("city", "sea", "king", "house")]
CHOICES = [" Moses", " the Lord", " a man of the land", " no man"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", capacity_tokens=65_536, block_size=16) as llm:
        yield llm


@pytest.fixture
def evaluator(llm: LLM) -> Evaluator:
    llm.reset_prefix_cache()
    return Evaluator(llm)


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    return build_tiny_model("eager").eval()


def logprobs_of(oracle: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Return `[len(ids), vocab_size]`: the log probabilities of each next token."""
    with torch.inference_mode():
        return oracle(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def expected_score(oracle: LlamaForCausalLM, before: list[int], after: list[int]) -> tuple[float, bool]:
    """Return the log probability of tokens after others, and whether greedy decoding would generate them."""
    rows = logprobs_of(oracle, [*before, *after[:-1]])[-len(after) :]
    total = sum(row[token].item() for row, token in zip(rows, after, strict=True))
    return total, rows.argmax(-1).tolist() == after


def test_loglikelihoods_are_those_of_transformers_in_the_order_of_the_requests(
    evaluator: Evaluator, llm: LLM, oracle: LlamaForCausalLM
) -> None:
    tokenizer = llm.get_tokenizer()
    greedy_token = int(logprobs_of(oracle, tokenizer.encode(QUESTIONS[0]))[-1].argmax())
    choices = (*CHOICES, tokenizer.decode([greedy_token]))
    pairs = [(question, choice) for question in reversed(QUESTIONS) for choice in choices]
    results = evaluator.loglikelihood(pairs)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, results, strict=True):
        before = tokenizer.encode(context)
        after = tokenizer.encode(context + continuation)[len(before) :]
        expected_logprob, expected_is_greedy = expected_score(oracle, before, after)
        assert abs(logprob - expected_logprob) < MAX_DIFFERENCE
        assert is_greedy is expected_is_greedy
    assert any(is_greedy for _, is_greedy in results)


def test_a_context_of_several_continuations_is_encoded_once(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    encode = evaluator.encode

    def recorded_encode(text: str) -> list[int]:
        texts.append(text)
        return encode(text)

    monkeypatch.setattr(evaluator, "encode", recorded_encode)
    evaluator.loglikelihood([(question, choice) for choice in CHOICES for question in QUESTIONS])
    # Each context alone, and with each of its continuations.
    assert len(texts) == len(set(texts)) == len(QUESTIONS) * (1 + len(CHOICES))


def test_white_space_at_the_end_of_a_context_belongs_to_the_continuation(evaluator: Evaluator) -> None:
    space_in_context = evaluator.loglikelihood([("And it came ", "to")])
    space_in_continuation = evaluator.loglikelihood([("And it came", " to")])
    assert space_in_context == space_in_continuation


def test_an_empty_context_is_replaced_by_the_prefix_token(
    evaluator: Evaluator, llm: LLM, oracle: LlamaForCausalLM
) -> None:
    after = llm.get_tokenizer().encode_rendered("And it came")
    ((logprob, _),) = evaluator.loglikelihood([("", "And it came")])
    expected_logprob, _ = expected_score(oracle, [evaluator.prefix_token_id], after)
    assert abs(logprob - expected_logprob) < MAX_DIFFERENCE


def test_a_shared_few_shot_prompt_is_computed_once(evaluator: Evaluator, llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    pairs = [(SHOTS + question, choice) for choice in CHOICES for question in QUESTIONS]  # the worst order
    evaluator.loglikelihood(pairs)
    contexts = {tuple(tokenizer.encode(context)) for context, _ in pairs}
    distinct_prefixes = {context[: end + 1] for context in contexts for end in range(len(context))}
    num_computed = evaluator.num_prompt_tokens - evaluator.num_cached_tokens
    assert evaluator.num_prompt_tokens == len(CHOICES) * sum(len(context) for context in contexts)
    # Each distinct prefix is computed once, and the last token of a request always.
    assert num_computed <= len(distinct_prefixes) + len(pairs)
    assert num_computed < 0.1 * evaluator.num_prompt_tokens


def test_requests_with_a_common_prefix_follow_each_other_so_that_a_small_cache_suffices() -> None:
    shots = [f"Q: Who said {word}?\nA: Moses\n\n" * 8 for word in ("yes", "no", "nothing")]
    pairs = [(shots[index % 3] + f"Q: Who is number {index}?\nA:", " Moses") for index in range(12)]
    # The engine itself prefers requests whose prefix is cached, but it sees no more than two of them at a time.
    settings = ["engine.max_running_requests=1", "engine.max_waiting_requests=1"]
    with LLM("tiny", capacity_tokens=192, block_size=16, settings=settings) as llm:
        evaluator = Evaluator(llm)
        evaluator.loglikelihood(pairs)
        num_shot_tokens = sum(len(llm.get_tokenizer().encode(each)) for each in shots)
    assert num_shot_tokens > 2 * 192, "the cache is too small for all prefixes"
    num_computed = evaluator.num_prompt_tokens - evaluator.num_cached_tokens
    max_question_tokens = 20
    assert num_computed < num_shot_tokens + len(pairs) * max_question_tokens


def test_a_context_that_is_too_long_loses_its_first_tokens(
    evaluator: Evaluator, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "max_model_len", 40)
    tokenizer = llm.get_tokenizer()
    long = "And it came to pass in those days. " * 8
    (result,) = evaluator.loglikelihood([(long, " Then Moses")])
    ids = tokenizer.encode(long.rstrip())
    after = tokenizer.encode(long + " Then Moses")[len(ids) :]
    assert len(ids) > llm.max_model_len
    (score,) = llm.score([ids[-(llm.max_model_len - len(after)) :]], [after])
    assert result == (score.logprob, score.is_greedy)


@pytest.mark.parametrize("num_repeats", [1, 2, 40])
def test_rolling_loglikelihoods_are_those_of_transformers(
    evaluator: Evaluator, llm: LLM, oracle: LlamaForCausalLM, num_repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "max_model_len", 34)  # so that windows are needed
    text = "".join(
        f"In the year {7919 * number % 97} he went {'up' if number % 3 else 'out'}. " for number in range(num_repeats)
    )
    (total,) = evaluator.loglikelihood_rolling([text])
    tokens, window_tokens = llm.get_tokenizer().encode(text), 32
    windows: list[tuple[list[int], list[int]]] = []  # the context and the scored tokens of each window
    for start in range(0, len(tokens), window_tokens):
        end = min(start + window_tokens, len(tokens))
        # The context is the token before the window. In the last window, it is as long as the length permits.
        context_start = max(0, end - window_tokens - 1)
        windows.append((tokens[context_start:start], tokens[start:end]))
    windows[0] = ([evaluator.prefix_token_id], windows[0][1])
    assert [token_id for _, scored in windows for token_id in scored] == tokens, "each token is scored once"
    assert len(windows[-1][1]) < window_tokens, "the test has a last window that is not full"
    expected_total = sum(expected_score(oracle, context, scored)[0] for context, scored in windows)
    assert abs(total - expected_total) < MAX_DIFFERENCE * len(windows)
    assert evaluator.loglikelihood_rolling([]) == []
    assert evaluator.loglikelihood_rolling([""]) == [0.0]


def test_answers_are_greedy_and_end_before_a_stop_text(evaluator: Evaluator, llm: LLM) -> None:
    whole, up_to_comma, with_many_stops = evaluator.generate_until(
        [
            ("And the Lord said unto Moses,", {"max_gen_toks": 24}),
            ("And the Lord said unto Moses,", {"until": [","], "max_gen_toks": 24}),
            ("And the Lord said unto Moses,", {"until": ["z" * 300, ","] * 20, "max_gen_toks": 24, "temperature": 0.0}),
        ]
    )
    assert whole.startswith(up_to_comma + ",")
    assert with_many_stops == up_to_comma
    (sampled,) = evaluator.generate_until(
        [("And the Lord said unto Moses,", {"do_sample": True, "temperature": 1.5, "seed": 3, "max_tokens": 24})]
    )
    assert sampled != whole
    greedy = SamplingParams(temperature=0, max_tokens=24)
    assert llm.generate("And the Lord said unto Moses,", greedy)[0].outputs[0].text == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 3}, r"requests\[1\]: expected options of generate_until .*got num_beams"),
        ({"do_sample": True, "temperature": -1.0}, r"requests\[1\]: temperature: expected a finite number from 0"),
        ({"until": 5}, r"requests\[1\]: "),
        ({"max_gen_toks": 10**6}, r"requests\[1\]: max_gen_toks: expected fewer than \d+"),
    ],
)
def test_unsupported_and_invalid_options_are_refused(
    evaluator: Evaluator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        evaluator.generate_until([("a", {}), ("b", options)])


def test_an_empty_continuation_is_refused(evaluator: Evaluator) -> None:
    with pytest.raises(InvalidRequest, match=r"requests\[1\]: expected a continuation of at least one token"):
        evaluator.loglikelihood([("a", " b"), ("a", "")])


def test_an_invalid_text_is_refused_with_its_index(evaluator: Evaluator) -> None:
    with pytest.raises(InvalidRequest, match=r"requests\[1\]: expected text in Unicode"):
        evaluator.loglikelihood_rolling(["a", "\ud800"])


def test_a_bos_token_in_a_text_is_not_added_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    tokenizer = Tokenizer.load(write_llama2_like(tmp_path))
    monkeypatch.setattr(llm, "get_tokenizer", lambda: tokenizer)
    evaluator = Evaluator(llm)
    assert evaluator.prefix_token_id == 1
    assert evaluator.encode("And it").count(1) == 1
    assert evaluator.encode("<s>And it").count(1) == 1
    assert tokenizer.encode("<s>And it").count(1) == 2, "encode adds another BOS token before any text"
