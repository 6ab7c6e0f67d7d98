"""The model `radixkv` of lm-evaluation-harness. Where lm_eval is not installed, stand-ins replace what it imports."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from radixkv.errors import InvalidRequest
from tests.patience import PATIENCE_S

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
PROMPT = "And the Lord said unto Moses,"


def stand_ins(registered: dict[str, type]) -> dict[str, ModuleType]:
    """Return modules with the names of lm_eval that the adapter imports.

    Args:
        registered: the stand-in of `register_model` adds the classes of models here, by name.
    """

    class LM:
        def __init__(self) -> None:
            self.cache_hook = SimpleNamespace(add_partial=lambda *_: None)

        @classmethod
        def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any]) -> LM:
            return cls(**arg_dict, **{name: value for name, value in additional_config.items() if value is not None})

    def register_model(name: str) -> Callable[[type], type]:
        return lambda model_class: registered.setdefault(name, model_class)

    modules = {
        name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
    }
    modules["lm_eval.api.model"].LM = LM  # type: ignore[attr-defined]
    modules["lm_eval.api.registry"].register_model = register_model  # type: ignore[attr-defined]
    return modules


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """A model of the adapter, as the harness creates one from its command line."""
    registered: dict[str, type] = {}
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_LM_EVAL:
            for name, module in stand_ins(registered).items():
                patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "radixkv.integrations.lm_eval", raising=False)
        adapter = importlib.import_module("radixkv.integrations.lm_eval")
        if HAS_LM_EVAL:
            from lm_eval.api.registry import get_model

            registered["radixkv"] = get_model("radixkv")
        assert registered == {"radixkv": adapter.RadixKVLM}
        model_arguments = {"pretrained": "tiny", "capacity_tokens": 16_384}
        harness_options = {"batch_size": 4, "max_batch_size": None, "device": "cuda:0"}
        model = adapter.RadixKVLM.create_from_arg_obj(model_arguments, harness_options)
        yield model
        model.llm.close()
    sys.modules.pop("radixkv.integrations.lm_eval", None)


def request(*args: object) -> Any:
    """Return the part of a request of the harness that the adapter reads."""
    return SimpleNamespace(args=args)


def test_requests_get_the_answers_of_the_evaluator(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_answers: list[tuple[str, object, object]] = []  # the harness saves them, to resume an evaluation
    monkeypatch.setattr(model, "cache_hook", SimpleNamespace(add_partial=lambda *each: saved_answers.append(each)))
    pairs = [(PROMPT, " speak"), ("", "speak")]
    scores = model.loglikelihood([request(*each) for each in pairs])
    assert scores == model.evaluator.loglikelihood(pairs)
    totals = model.loglikelihood_rolling([request(PROMPT)], disable_tqdm=True)
    assert totals == model.evaluator.loglikelihood_rolling([PROMPT])
    options = {"until": ["."], "max_gen_toks": 12}
    answers = model.generate_until([request(PROMPT, options)])
    assert answers == model.evaluator.generate_until([(PROMPT, options)])
    assert saved_answers == [
        *(("loglikelihood", pair, score) for pair, score in zip(pairs, scores, strict=True)),
        ("loglikelihood_rolling", (PROMPT,), totals[0]),
        ("generate_until", (PROMPT, options), answers[0]),
    ]


def test_conversations_are_rendered_with_the_template_of_the_model(model: Any) -> None:
    messages = [{"role": "user", "content": "Where is my father?"}]
    rendered = model.apply_chat_template(messages)
    assert rendered == model.llm.get_tokenizer().render_chat(messages, add_generation_prompt=True)
    for beginning in ("The answer is ", "The door"):
        answer = {"role": "assistant", "content": beginning}
        continued = model.apply_chat_template([*messages, answer], add_generation_prompt=False)
        assert continued == rendered + beginning, "the model continues the last message"
    with pytest.raises(InvalidRequest, match="expected text in the last message"):
        model.apply_chat_template([*messages, {"role": "assistant", "content": ""}], add_generation_prompt=False)
    assert model.chat_template(True) == "radixkv-tiny-chat"
    assert model.chat_template(False) is None


TASK = {
    "task": "radixkv_test",
    "dataset_path": "json",
    "test_split": "train",
    "fewshot_split": "train",
    "doc_to_text": "Q: {{question}}\nA:",
    "doc_to_target": "{{answer}}",
    "doc_to_choice": [" Moses", " a king"],
    "output_type": "multiple_choice",
    "num_fewshot": 3,
    "metric_list": [{"metric": "acc"}],
}


@pytest.mark.skipif(not HAS_LM_EVAL, reason="lm_eval is not installed")
def test_an_evaluation_by_the_harness_computes_few_shot_prompts_once(model: Any, tmp_path: Any) -> None:
    script = """
import json, sys
import datasets, lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.api.task import ConfigurableTask
import radixkv.integrations.lm_eval as adapter

task_config = json.loads(sys.argv[1])
task = ConfigurableTask(config=task_config)
model = adapter.RadixKVLM("tiny", capacity_tokens=16_384)
results = lm_eval.simple_evaluate(model, tasks=[task], num_fewshot=3, bootstrap_iters=0)
accuracy = results["results"]["radixkv_test"]["acc,none"]
print(json.dumps([accuracy, model.evaluator.num_prompt_tokens, model.evaluator.num_cached_tokens]))
"""
    data_file = tmp_path / "data.jsonl"
    rows = [{"question": f"Who said the words number {each}?", "answer": each % 2} for each in range(8)]
    data_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASK | {"dataset_kwargs": {"data_files": {"train": str(data_file)}}}
    process = subprocess.run(
        [sys.executable, "-c", script, json.dumps(task)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    accuracy, num_prompt_tokens, num_cached_tokens = json.loads(process.stdout.splitlines()[-1])
    assert 0 <= accuracy <= 1
    assert num_cached_tokens > 0.5 * num_prompt_tokens
