"""All ways to answer a few questions agree, and a wrong log probability ends the benchmark."""

import json
from pathlib import Path

import pytest

from bench.evaluation import NUM_CHOICES, main, make_questions, require_agreement
from radixkv.model.tiny_model import build_tiny_model
from tests.service.text.tokenizers import write_tiny


def test_questions_are_the_same_for_a_seed_and_have_one_right_choice_of_four() -> None:
    questions = make_questions(5)
    assert questions == make_questions(5) != make_questions(5, seed=1)
    assert all(len(set(each.choices)) == NUM_CHOICES for each in questions)
    assert {each.right for each in make_questions(40)} == set(range(NUM_CHOICES))


@pytest.mark.long
def test_all_ways_agree_and_the_examples_are_computed_once(tmp_path: Path) -> None:
    model = tmp_path / "model"
    build_tiny_model("eager").save_pretrained(model)
    write_tiny(model)
    main(
        ["--model", str(model), "--questions", "2", "--shots", "2", "--rounds", "1", "--json", str(tmp_path / "r.json")]
    )
    result = json.loads((tmp_path / "r.json").read_text())
    assert set(result["largest_difference"]) == set(result["over_transformers"]) == set(result["seconds"])
    assert max(result["largest_difference"].values()) < 1e-4
    tokens = result["context_tokens"]
    assert tokens["cached"] > tokens["prompt"] * (NUM_CHOICES - 1) / NUM_CHOICES


def test_other_log_probabilities_end_the_benchmark() -> None:
    assert require_agreement([-2.0, -0.5], [-2.0, -0.5001], "same") == pytest.approx(1e-4, rel=1e-2)
    with pytest.raises(RuntimeError, match="other: expected the log probabilities of transformers"):
        require_agreement([-2.0], [-2.01], "other")
