import json
from pathlib import Path

import numpy as np
import pytest

from radixkv.errors import ConfigError
from radixkv.model_files.gguf_directory import gguf_directory
from radixkv.model_files.gguf_file import GgufFile
from radixkv.model_files.gguf_tokenizer import tokenizer_files
from radixkv.service.text.tokenizer import Tokenizer
from tests.service.text.tokenizers import byte_level

SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
# A vocabulary like Llama's: special tokens and bytes, and then letters and merged pieces, in the order of their scores.
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [SPACE, *"abc", "ab", f"{SPACE}a", f"{SPACE}ab", "abc", SPACE * 2]
TEXTS = ("", "abc", " ab  c", "a é\U0001f389", "</s>a", "x 12 ab", "a\nb", "ab<s>ab")


def sentencepiece_values(**options):
    """Return the metadata of a SentencePiece tokenizer, with `options` added or replaced; None removes a value."""
    tokens = [*PIECES, *WORDS]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS)]
    values = {
        "model": "llama",
        "tokens": tuple(tokens),
        "token_type": tuple(types),
        "scores": tuple(-float(index) for index in range(len(tokens))),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **options,
    }
    return {key: value for key, value in values.items() if value is not None}


def byte_level_values(**options):
    """Return the metadata of the embedded model's tokenizer, with `options` added or replaced."""
    definition = json.loads(byte_level().definition)
    special = {each["id"] for each in definition["added_tokens"]}
    vocab = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].get)
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tuple(vocab),
        "token_type": tuple(CONTROL if index in special else NORMAL for index in range(len(vocab))),
        "merges": tuple(" ".join(pair) for pair in definition["model"]["merges"]),
        "eos_token_id": 511,
        "bos_token_id": 509,
        **options,
    }


def load(directory, values, architecture="llama", **metadata):
    """Write the tokenizer files of a GGUF file with these values to a directory, and load the tokenizer from it."""
    metadata |= {"general.architecture": architecture, "llama.context_length": 77}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    for name, content in tokenizer_files(GgufFile(Path("model.gguf"), metadata, {})).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    return Tokenizer.load(directory)


@pytest.mark.parametrize("text", ["", "Hello, é world \U0001f389", "<|im_start|>user\n hi 1234", "don't  stop"])
def test_a_byte_level_vocabulary_encodes_and_decodes_as_the_original(tmp_path, text):
    tokenizer = load(tmp_path, byte_level_values())
    assert tokenizer.encode(text) == byte_level().encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == byte_level().decode(byte_level().encode(text))


def test_words_are_divided_as_the_file_says(tmp_path):
    """With SmolLM2 and Qwen2, each digit is a word of its own. With Llama 3, a text begins with the token <bos>."""
    pairs = [("1 2", "12"), ("a b", "ab"), ("ab c", "abc")]
    tokens = tuple("".join(each) for each in [*"\u0120123abc", "12", "ab", "x\u0120", "<bos>"])
    values = {"tokens": tokens, "token_type": (*[NORMAL] * 10, CONTROL), "bos_token_id": 10}
    values |= {"model": "gpt2", "merges": tuple(pair for pair, _ in pairs[:2])}
    expected = {"gpt-2": [7, 3], "smollm": [1, 2, 3], "llama-bpe": [10, 1], "qwen2": [1, 2, 3], "dbrx": [7, 3]}
    for pre, ids in expected.items():
        (tmp_path / pre).mkdir()
        token_ids = load(tmp_path / pre, {**values, "pre": pre}).encode("123")
        assert token_ids == ([10, 7, 3] if pre == "llama-bpe" else ids), pre
    (tmp_path / "no").mkdir()
    assert load(tmp_path / "no", {**values, "pre": "llama-bpe", "add_bos_token": False}).encode("123") == [7, 3]


def test_a_word_that_is_a_token_needs_no_merges_in_llama_3(tmp_path):
    values = {"model": "gpt2", "tokens": ("a", "b", "c", "abc"), "token_type": (NORMAL,) * 4, "merges": ()}
    for pre, ids in {"llama-bpe": [3], "qwen2": [0, 1, 2]}.items():
        (tmp_path / pre).mkdir()
        assert load(tmp_path / pre, {**values, "pre": pre}).encode("abc") == ids


def test_characters_are_composed_for_qwen(tmp_path):
    for pre, is_composed in {"qwen2": True, "gpt-2": False}.items():
        (tmp_path / pre).mkdir()
        tokenizer = load(tmp_path / pre, byte_level_values(pre=pre))
        assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) is is_composed


def test_old_files_of_qwen_do_not_name_the_pre_tokenizer(tmp_path):
    values = byte_level_values()
    del values["pre"]
    assert load(tmp_path, values, "qwen2").encode("a") == byte_level().encode("a")
    with pytest.raises(
        ConfigError, match=r"tokenizer\.ggml\.pre: expected one of gpt-2, .*, got none: serve the model fr"
    ):
        load(tmp_path, values, "llama")


def test_pieces_of_sentencepiece_are_merged_by_their_scores(tmp_path):
    tokenizer = load(tmp_path, sentencepiece_values())
    first = len(PIECES)
    ids = {word: first + index for index, word in enumerate(WORDS)}
    assert tokenizer.encode("abc") == [1, ids[f"{SPACE}ab"], ids["c"]], "ab is merged first, then with the space"
    assert tokenizer.encode("\n") == [1, ids[SPACE], 3 + ord("\n")], "bytes"
    assert tokenizer.encode("</s>") == [1, 2]
    for text in ("abc", "a é\U0001f389", "a\nb  c"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_file_states_whether_a_space_and_special_tokens_are_added(tmp_path):
    tokenizer = load(tmp_path, sentencepiece_values(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    first = len(PIECES)
    assert tokenizer.encode("ab") == [first + WORDS.index("ab"), 2]


def test_gemma_merges_by_position_and_never_adds_a_space(tmp_path):
    values = sentencepiece_values(tokens=(*PIECES, *WORDS[:-1], "  "), scores=(0.0,) * (len(PIECES) + len(WORDS)))
    values["token_type"] = (*values["token_type"][:-1], USER)
    tokenizer = load(tmp_path, values, "gemma3")
    first = len(PIECES)
    assert tokenizer.encode("ab") == [1, first + WORDS.index("ab")]
    assert tokenizer.encode("a  b")[2] == first + WORDS.index(SPACE * 2), "two spaces are one token"
    assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_token_ids_are_those_of_transformers(tmp_path, kind, monkeypatch):
    """These are architectures whose tokenizers transformers reads as llama.cpp does."""
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    values = sentencepiece_values() if kind == "llama" else byte_level_values()
    architecture = "phi3" if kind == "llama" else "qwen3"
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
        writer.add_uint32(f"{architecture}.{name}", 8)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1.0)
    for name, value in values.items():
        add = {str: writer.add_string, int: writer.add_uint32, tuple: writer.add_array, bool: writer.add_bool}
        add[type(value)](f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(values["tokens"]), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=path.name, local_files_only=True)
    ours = Tokenizer.load(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    assert gguf_directory(path) == gguf_directory(path)


def test_templates_and_special_tokens_are_written(tmp_path):
    tokenizer = load(
        tmp_path,
        byte_level_values(),
        **{
            "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
            "tokenizer.chat_template.tool_use": "{{ tools }}{{ messages[0].content }}",
            "tokenizer.chat_template.../x": "never",
        },
    )
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [509, ord("a")]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}], tools=["x"])[-1] == ord("a")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["model_max_length"]) == ("<|im_end|>", 77)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "additional_chat_templates",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize("values", [{}, {"model": "none"}, {"model": "no_vocab"}])
def test_a_file_may_have_no_vocabulary(values):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    assert tokenizer_files(GgufFile(Path("model.gguf"), metadata, {})) == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: expected gpt2 or llama, got bert: serve the model from a directory"),
        (byte_level_values(pre="martian"), r"tokenizer.ggml.pre: expected one of gpt-2, .*, got martian: serve the mo"),
        ({"model": "gpt2", "pre": "gpt-2"}, "tokenizer.ggml.tokens: expected a vocabulary, got none"),
        (
            sentencepiece_values(token_type=(1,)),
            r"token_type: expected one type for each token, got 1 types and \d+ tokens$",
        ),
        (
            sentencepiece_values(scores=None),
            "its tokenizer is damaged: tokenizer.ggml.scores: expected one for each token",
        ),
        (byte_level_values(merges=("q q q",)), "its tokenizer is damaged: "),
    ],
)
def test_other_tokenizers_are_refused(values, message):
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    with pytest.raises(ConfigError, match=message):
        tokenizer_files(GgufFile(Path("model.gguf"), metadata, {}))
