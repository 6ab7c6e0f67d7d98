import random

import pytest
from transformers import AutoConfig, AutoTokenizer

from radixkv.model.tiny_files import SPECIAL_TOKENS, write_tiny_files
from radixkv.model.tiny_model import tiny_config


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_files(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def test_the_tokenizer_has_a_piece_for_each_id_of_the_model(tokenizer):
    assert len(tokenizer) == tiny_config().vocab_size
    assert len(set(tokenizer.get_vocab().values())) == tiny_config().vocab_size
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [509, 510, 511]


def test_the_first_ids_are_bytes(tokenizer):
    text = "é€🎉, plain text\n"
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("~") == [ord("~")]


def test_any_text_is_decoded_to_itself(tokenizer):
    rng = random.Random(0)
    for _ in range(200):
        points = [rng.choice((rng.randrange(128), rng.randrange(0xD7FF), rng.randrange(0x10000, 0x10FFFF)))]
        text = "".join(map(chr, points * rng.randrange(1, 4))) + " the end"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_frequent_pieces_are_one_token(tokenizer):
    assert len(tokenizer.encode(" and she said unto the man that would have been there")) < 15


def test_a_chat_is_marked_by_special_tokens(tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    assert [each for each in tokenizer.encode(text) if each >= 509] == [510, 511, 510, 511, 510]


def test_the_config_matches_the_model(directory):
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    ours = tiny_config()
    assert config.model_type == ours.model_type
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim"):
        assert getattr(config, name) == getattr(ours, name), name
    assert config.eos_token_id == [509, 511]
