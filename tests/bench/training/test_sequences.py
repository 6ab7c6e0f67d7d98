"""Rows are reproducible, cover the text evenly, and include chats."""

from __future__ import annotations

import pytest
import torch

from bench.training.corpus import Document
from bench.training.sequences import STEP_TOKENS, Sequences, build_sequences
from bench.training.tokenizer import load_tokenizer

DIALOGUE = "\n\n".join(f'"Is it number {i}?" said she.' for i in range(200)) + "\n"
END, START_OF_TURN, END_OF_TURN = 509, 510, 511


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    documents = [Document("austen", DIALOGUE), Document("king_james", "Chapter 1\n\nIn the beginning.\n" * 300)]
    return build_sequences(documents, load_tokenizer(), seed=0)


def test_a_step_has_the_same_rows_each_time(sequences: Sequences) -> None:
    same_seed = Sequences(sequences.text, sequences.chats, 0)
    other_seed = Sequences(sequences.text, sequences.chats, 1)
    assert all(torch.equal(sequences.rows(step), same_seed.rows(step)) for step in range(10))
    assert any(not torch.equal(sequences.rows(step), other_seed.rows(step)) for step in range(10))


def test_every_step_reads_as_many_tokens(sequences: Sequences) -> None:
    shapes = {tuple(sequences.rows(step).shape) for step in range(60)}
    assert shapes == {(STEP_TOKENS // length, length + 1) for length in (256, 512, 1024, 2048)}


def test_the_text_is_read_evenly() -> None:
    text = torch.arange(100_000)  # each token is its own position
    sequences = Sequences(text, text[:3000], seed=0)
    times_read = torch.zeros(100_000)
    for step in range(1000):
        rows = sequences.rows(step)
        rows_of_text = rows if rows.shape[1] > 257 else rows[1:4]  # of the shortest rows, some are chats
        for row in rows_of_text:
            times_read[row[:-1]] += 1
    # The first and the last tenth are read less often, because a row can't begin before the text or near its end.
    times_by_tenth = times_read.view(10, -1).mean(1)[1:-1]
    assert times_by_tenth.min() > 0.7 * times_by_tenth.max()


def test_documents_and_turns_are_delimited_by_special_tokens(sequences: Sequences) -> None:
    assert (sequences.text == END).sum() == 2
    assert not torch.isin(sequences.text, torch.tensor([START_OF_TURN, END_OF_TURN])).any()
    assert (sequences.chats == START_OF_TURN).sum() == (sequences.chats == END_OF_TURN).sum() > 150


def test_a_paragraph_answers_the_one_before_it(sequences: Sequences) -> None:
    chats = load_tokenizer().decode(sequences.chats)
    assert (
        '"Is it number 0?" said she.<|im_end|>\n<|im_start|>assistant\n"Is it number 1?" said she.<|im_end|>' in chats
    )
    assert "beginning" not in chats
