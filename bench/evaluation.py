"""Compares a few-shot evaluation in radixkv with transformers: multiple choice after the same examples.

    python -m bench.evaluation --model DIR --json bench/results/evaluation.json

DIR is a checkpoint with a tokenizer, which `radixkv convert` writes from a GGUF file. Each question is a passage of a
book with four possible next sentences, one of which is right. By default, five examples of the same kind precede it.
The log probability of each choice is computed

- by `radixkv.integrations.evaluation.Evaluator`, with an empty cache at the beginning;
- by transformers, with the four choices of a question as one batch;
- by transformers as well, but the K/V of the examples are computed once, and copied for each question.

All compute in float32 with the same number of threads, in turn. The log probabilities must agree, and only scoring is
timed, without loading the model.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from bench.parts.result_file import write_result
from bench.training.corpus import held_out_documents
from radixkv import LLM
from radixkv.integrations.evaluation import Evaluator
from radixkv.integrations.transformers.model_requirements import cache_name
from radixkv.service.cli.argument_types import positive

NUM_CHOICES = 4
_PASSAGE_SENTENCES = 5
_SENTENCE_CHARACTERS = (40, 240)  # the shortest and the longest sentence that is used
_TOLERANCE = 1e-3  # relative, or absolute for log probabilities above -1
_WARM_UP_QUESTIONS = 2


@dataclass(frozen=True, slots=True)
class Question:
    """A passage and its possible continuations.

    Attributes:
        passage: some sentences.
        choices: sentences, each with a space before it.
        right: index of the right choice.
    """

    passage: str
    choices: tuple[str, ...]
    right: int


Score = Callable[[Sequence[Question]], list[float]]  # log probabilities of all choices of all questions, in order


def make_questions(num_questions: int, seed: int = 0) -> list[Question]:
    """Make questions from books. The same seed gives the same questions."""
    rng = random.Random(seed)
    sentences: list[str] = []
    for document in held_out_documents():
        on_one_line = (" ".join(each.split()) for each in re.split(r"(?<=[.!?])\s+", document.text))
        sentences += [each for each in on_one_line if _SENTENCE_CHARACTERS[0] <= len(each) <= _SENTENCE_CHARACTERS[1]]
    questions = []
    for start in rng.sample(range(len(sentences) - _PASSAGE_SENTENCES), num_questions):
        end = start + _PASSAGE_SENTENCES
        choices = [f" {each}" for each in (sentences[end], *rng.sample(sentences, NUM_CHOICES - 1))]
        right = rng.randrange(NUM_CHOICES)
        choices[0], choices[right] = choices[right], choices[0]
        questions.append(Question(" ".join(sentences[start:end]), tuple(choices), right))
    return questions


def context_of(question: Question) -> str:
    """Return the text before the choices."""
    return f"Passage: {question.passage}\nNext:"


class TransformersScores:
    """Scores with transformers.

    Args:
        path: the checkpoint.
        shots: the text of the examples.
    """

    def __init__(self, path: Path, shots: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._shots = shots
        # Without the last token, which may be another one when a question follows the examples.
        self._shot_ids = self._tokenizer.encode(shots)[:-1]

    def plain(self, questions: Sequence[Question]) -> list[float]:
        """Compute all tokens of each choice."""
        return [each for question in questions for each in self._score(question, None)]

    def with_copied_examples(self, questions: Sequence[Question]) -> list[float]:
        """Compute the examples once, and copy their K/V for each question."""
        cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            self._model(torch.tensor([self._shot_ids]), **{cache_name(self._model): cache})
        return [each for question in questions for each in self._score(question, cache)]

    def _score(self, question: Question, cache: DynamicCache | None) -> list[float]:
        context = self._shots + context_of(question)
        num_context_tokens = len(self._tokenizer.encode(context))
        rows = [self._tokenizer.encode(context + choice) for choice in question.choices]
        start = 0 if cache is None else len(self._shot_ids)
        if any(row[:start] != self._shot_ids[:start] for row in rows):
            raise ValueError("the examples have other tokens before this question")
        options: dict[str, Any] = {}
        if cache is not None:
            question_cache = copy.deepcopy(cache)
            question_cache.batch_repeat_interleave(NUM_CHOICES)
            options[cache_name(self._model)] = question_cache
        length = max(map(len, rows))
        ids = torch.tensor([row[start:] + [0] * (length - len(row)) for row in rows])  # [num_choices, length - start]
        num_logits = length - num_context_tokens + 1  # from the last token of the context, which predicts the choice
        with torch.inference_mode():  # padding is on the right, so the tokens before it do not attend to it
            logits = self._model(ids, logits_to_keep=num_logits, **options).logits
        logprobs = logits.log_softmax(-1)  # [num_choices, num_logits, vocab_size]
        return [
            sum(float(logprobs[index, position, token]) for position, token in enumerate(row[num_context_tokens:]))
            for index, row in enumerate(rows)
        ]


class EvaluatorScores:
    """Scores with `Evaluator`.

    Args:
        llm: the model.
        shots: the text of the examples.

    Attributes:
        evaluator: the evaluator of the last call, which counted its tokens.
    """

    def __init__(self, llm: LLM, shots: str) -> None:
        self._llm = llm
        self._shots = shots
        self.evaluator = Evaluator(llm, use_tqdm=False)

    def __call__(self, questions: Sequence[Question]) -> list[float]:
        """Score with an empty cache at the beginning."""
        self._llm.reset_prefix_cache()
        self.evaluator = Evaluator(self._llm, use_tqdm=False)
        pairs = [(self._shots + context_of(each), choice) for each in questions for choice in each.choices]
        return [logprob for logprob, _ in self.evaluator.loglikelihood(pairs)]


def require_agreement(expected: Sequence[float], actual: Sequence[float], name: str) -> float:
    """Return the largest `|expected - actual| / max(1, |expected|)` of log probabilities.

    Raises:
        RuntimeError: they do not agree.
    """
    differences = [abs(a - b) / max(1.0, abs(a)) for a, b in zip(expected, actual, strict=True)]
    if max(differences) > _TOLERANCE:
        raise RuntimeError(f"{name}: expected the log probabilities of transformers, got others: {max(differences)}")
    return max(differences)


def measure(path: Path, num_questions: int, num_shots: int, rounds: int) -> dict[str, Any]:
    """Measure all ways to score the questions, in turn, and compare their log probabilities."""
    examples, questions = make_questions(num_shots, seed=1), make_questions(num_questions)
    shots = "".join(f"{context_of(each)}{each.choices[each.right]}\n\n" for each in examples)
    transformers = TransformersScores(path, shots)
    with LLM(str(path), dtype="float32") as llm:
        ours = EvaluatorScores(llm, shots)
        ways: dict[str, Score] = {
            "radixkv": ours,
            "transformers": transformers.plain,
            "transformers with copied examples": transformers.with_copied_examples,
        }
        for score in ways.values():
            score(questions[:_WARM_UP_QUESTIONS])
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        scores: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, score in ways.items():
                start_s = time.perf_counter()
                scores[name] = score(questions)
                seconds[name].append(time.perf_counter() - start_s)
        tokens = {"prompt": ours.evaluator.num_prompt_tokens, "cached": ours.evaluator.num_cached_tokens}
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    expected = scores["transformers"]
    num_right = 0
    for index, question in enumerate(questions):
        choice_scores = expected[index * NUM_CHOICES : (index + 1) * NUM_CHOICES]
        num_right += choice_scores.index(max(choice_scores)) == question.right
    return {
        "questions": num_questions,
        "shots": num_shots,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "over_transformers": {name: each / medians["transformers"] for name, each in medians.items()},
        "context_tokens": tokens,
        "largest_difference": {name: require_agreement(expected, each, name) for name, each in scores.items()},
        "accuracy": num_right / num_questions,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m bench.evaluation", description="Compare a few-shot evaluation.")
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint with a tokenizer")
    parser.add_argument("--questions", type=positive, default=200, help="number of questions")
    parser.add_argument("--shots", type=positive, default=5, help="examples before each question")
    parser.add_argument("--rounds", type=positive, default=3, help="times that each way is measured")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args(arguments)
    result = measure(options.model, options.questions, options.shots, options.rounds)
    for name, ratio in result["over_transformers"].items():
        print(
            f"{name:34} {statistics.median(result['seconds'][name]):8.1f} s  {ratio:6.3f} of the time of transformers"
        )
    print(result["context_tokens"], f"accuracy {result['accuracy']:.3f}")
    write_result(options.json, "bench.evaluation", arguments, {"model": options.model.name, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
