"""The merges of the tokenizer are those that are learned from the training text."""

from __future__ import annotations

import pytest

from bench.training.corpus import training_documents
from bench.training.merges import NUM_MERGES, learn_merges
from radixkv.model.tiny_files import merges


@pytest.mark.long
def test_the_tokenizer_has_the_merges_of_the_training_text() -> None:
    assert learn_merges(document.text for document in training_documents()) == merges()
    assert len(merges()) == NUM_MERGES


def test_frequent_pairs_come_first() -> None:
    assert learn_merges(["ab ab ab ab cd"], 2) == [("a", "b"), ("_", "ab")]
