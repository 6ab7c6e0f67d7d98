import json
import logging
import sys

import pytest
import torch

from bench import exactness
from bench.parts.result_file import write_json


def test_both_modes_are_measured_in_turn(tmp_path, monkeypatch, capsys):
    file = tmp_path / "exactness.json"
    arguments = ["--shape", "tiny", "--rounds", "1", "--prompts", "70", "--suffixes", "3", "--dtypes", "float32"]
    monkeypatch.setattr(sys, "argv", ["exactness", *arguments, "--json", str(file)])
    written = []  # the number of rows and the state of each result that was written

    def write(path, result):
        written.append((len(result["rows"]), result["is_finished"]))
        write_json(path, result)

    monkeypatch.setattr(exactness, "write_json", write)
    exactness.main()
    assert written == [(1, False), (2, False), (2, True)]
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [(row["computed_tokens"], row["cached_tokens"]) for row in result["rows"]] == [(70, 0), (3, 2048)]
    for row in result["rows"]:
        assert row["ratio"] == pytest.approx(row["exact_s"] / row["fast_s"])
        assert row["exact_s"] > 0
        assert row["fast_s"] > 0
    assert "70 tokens after    0 cached" in capsys.readouterr().out
    assert result["command"].startswith("python -m bench.exactness --shape tiny")


def test_no_fingerprint_of_random_weights_is_computed(caplog):
    with caplog.at_level(logging.INFO):
        runner = exactness.build_runner("tiny", 1, torch.float32, torch.device("cpu"), 128, is_exact=False)
    assert runner.model.fingerprint == "random"
    assert "fingerprint" not in caplog.text
