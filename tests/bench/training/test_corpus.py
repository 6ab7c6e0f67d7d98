"""Held-out documents are complete, and do not occur in the training text."""

from __future__ import annotations

from bench.training.corpus import held_out_documents, training_documents


def test_held_out_text_was_never_trained_on() -> None:
    training = training_documents()
    held_out = held_out_documents()
    assert [document.title for document in held_out] == ["Persuasion", "The Acts"]
    assert not {document.title for document in training} & {document.title for document in held_out}
    training_paragraphs = {paragraph for document in training for paragraph in document.text.split("\n")}
    for document in held_out:
        lines = [line for line in document.text.split("\n") if len(line) > 40]
        assert len(lines) > 900
        assert sum(line in training_paragraphs for line in lines) <= 2, "verses that two books share"


def test_the_text_is_five_novels_and_65_books() -> None:
    documents = training_documents()
    assert [sum(document.source == source for document in documents) for source in ("austen", "king_james")] == [5, 65]
    assert sum(len(document.text) for document in documents) > 7_500_000
    assert documents[0].paragraphs[0] == "EMMA"
    assert all(not set(document.text) & set("_+\f\r\t") for document in documents), (
        "these characters separate merges and documents"
    )
