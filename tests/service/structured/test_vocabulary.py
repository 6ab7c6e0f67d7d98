import numpy as np
import pytest

pytest.importorskip("llguidance")

from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.structured.grammar_text import GrammarText
from radixkv.service.structured.matcher import GrammarConstraint
from radixkv.service.structured.vocabulary import Vocabulary

SPECIAL = {509, 510, 511}  # of the embedded model's tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return ModelTokenizer("tiny").load()


def allowed(vocabulary: Vocabulary, regex: str, stop_token_ids: frozenset[int] = frozenset()) -> set[int]:
    """Return the tokens that may begin a text that matches the regular expression."""
    matcher = GrammarConstraint(GrammarText("regex", "regex", regex), vocabulary).start(stop_token_ids)
    return set(np.flatnonzero(matcher.allowed()).tolist())


def test_tokens_have_the_bytes_of_the_tokenizer(tokenizer):
    vocabulary = Vocabulary.of(tokenizer.definition, 512, ())
    assert vocabulary.without_text >= SPECIAL
    texts = {token_id: tokenizer.decode([token_id]) for token_id in range(512)}
    starting = {token_id for token_id, text in texts.items() if text and "the quick".startswith(text)}
    assert len(starting) > 1, "some tokens have several letters"
    assert allowed(vocabulary, "the quick") == starting


def test_special_tokens_do_not_spell_text(tokenizer):
    allowed_ids = allowed(Vocabulary.of(tokenizer.definition, 512, ()), r"(?s:.+)")
    assert allowed_ids & SPECIAL == set()
    assert {ord("a"), ord("\n"), 0xC3} <= allowed_ids, "also the first byte of a character"
    assert 0xFF not in allowed_ids


def test_an_end_of_sequence_is_never_text(tokenizer):
    vocabulary = Vocabulary.of(tokenizer.definition, 512, {ord("z")})  # z is the end of sequence
    assert allowed(vocabulary, "[zx]*") == {ord("x")}
    assert allowed(vocabulary, "[zx]*", frozenset({ord("z"), ord("x")})) == {ord("z"), ord("x")}


@pytest.mark.parametrize("vocab_size", [300, 512, 700])
def test_a_model_may_have_more_or_fewer_tokens_than_its_tokenizer(tokenizer, vocab_size):
    vocabulary = Vocabulary.of(tokenizer.definition, vocab_size, {2})
    assert vocabulary.vocab_size == vocab_size
    matcher = GrammarConstraint(GrammarText("regex", "regex", "(?s:.+)"), vocabulary).start(frozenset({2}))
    assert matcher.allowed().shape == (vocab_size,)
    assert not matcher.allowed()[512:].any()


def test_files_that_are_no_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"."):
        Vocabulary.of('{"version": "1.0"}', 512, ())
