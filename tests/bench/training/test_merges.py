"""The merges are learned from the training text, and the tokenizer holds them."""

from __future__ import annotations

import pytest

from bench.training.corpus import training_documents
from bench.training.merges import NUM_MERGES, learn_merges, main
from radixkv.model.tiny_files import merges


@pytest.mark.long
def test_the_tokenizer_holds_the_merges_of_the_training_text() -> None:
    assert learn_merges(document.text for document in training_documents()) == merges()
    assert len(merges()) == NUM_MERGES


def test_frequent_pairs_come_first() -> None:
    assert learn_merges(["ab ab ab ab cd"], 2) == [("a", "b"), ("_", "ab")]


def test_the_command_prints_lines_for_the_source(capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("bench.training.merges.training_documents", list)
    monkeypatch.setattr("bench.training.merges.learn_merges", lambda _: [("_", "t"), ("h", "e")] * 30)
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("    _+t h+e _+t")
    assert max(map(len, lines)) <= 120
