"""Every end-of-sequence token that a file of the model names ends a generation."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.model.end_tokens import end_token_ids
from radixkv.model.loading import load_model
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint

TURN_END = {"content": "<|im_end|>", "special": True}


def write(directory: Path, **files: dict[str, Any]) -> Path:
    """Write JSON files, named without their suffix, to a directory, and return it."""
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_a_warning_lists_files_that_name_different_end_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write(
        tmp_path,
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": 2},
        tokenizer_config={"eos_token": "<|im_end|>", "added_tokens_decoder": {"12": TURN_END}},
    )
    with caplog.at_level(logging.WARNING):
        assert end_token_ids(files, 300) == {2, 12}
    assert "generation_config.json names [2], config.json names [2], the tokenizer names [12]" in caplog.text


def test_without_contradiction_no_warning_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write(
        tmp_path,
        config={"text_config": {"eos_token_id": 12}},
        generation_config={"eos_token_id": [2, 12]},  # as in many chat models, it names the tokens of all other files
        tokenizer_config={"eos_token": TURN_END, "added_tokens_decoder": {"12": TURN_END}},
    )
    with caplog.at_level(logging.WARNING):
        assert end_token_ids(files, 300) == {2, 12}
    assert not caplog.records


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<end>", "added_tokens_decoder": {"7": {"content": "<end>"}}}},
        {"tokenizer_config": {"eos_token": "<end>"}, "tokenizer": {"added_tokens": [{"id": 7, "content": "<end>"}]}},
        {"tokenizer_config": {"eos_token": "<end>"}, "tokenizer": {"model": {"vocab": {"<end>": 7}}}},
        {"tokenizer_config": {"eos_token": "b"}, "tokenizer": {"model": {"vocab": [["x", 0.0]] * 7 + [["b", -1.0]]}}},
        {"special_tokens_map": {"eos_token": {"content": "<end>"}}, "added_tokens": {"<end>": 7}},
        {"tokenizer_config": {"eos_token": "<end>"}, "vocab": {"<end>": 7}},
        {"config": {"eos_token_id": 7}},
        {"config": {"eos_token_id": 1, "text_config": {"eos_token_id": [7]}}, "generation_config": {"eos_token_id": 1}},
    ],
)
def test_the_end_token_is_found_in_each_place_of_the_files(files: dict[str, Any], tmp_path: Path) -> None:
    assert end_token_ids(write(tmp_path, **files), 300) >= {7}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config": {"eos_token_id": -1}, "generation_config": {"eos_token_id": 300}},
        {"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": None}},
        {"tokenizer_config": {"eos_token": "<not in the vocabulary>"}, "tokenizer": {"model": {"vocab": None}}},
        {"tokenizer_config": {"eos_token": ["<end>"], "added_tokens_decoder": []}},
        {"config": {"eos_token_id": True}, "generation_config": {"eos_token_id": ["2", [3]]}},
    ],
)
def test_an_id_outside_the_vocabulary_is_no_end_token(
    files: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert end_token_ids(write(tmp_path, **files), 300) == set()
    assert not caplog.records


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config\.json: expected a JSON object"):
        end_token_ids(tmp_path, 300)


def test_a_loaded_model_has_the_end_tokens_of_all_files_but_not_the_default_of_its_class(tmp_path: Path) -> None:
    """config.json has no entry, for which the configuration class of transformers has the default 2."""
    write_checkpoint(CONFIGS["llama"], tmp_path, max_shard_size="10MB")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    tokenizer = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"12": TURN_END}}
    write(tmp_path, config=config, generation_config={"eos_token_id": 5}, tokenizer_config=tokenizer)
    assert load_model(ModelConfig(path=str(tmp_path), device="cpu")).eos_token_ids == {5, 12}
