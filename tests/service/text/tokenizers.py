"""Small tokenizers of all kinds, generated in the file formats of published models."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "Hello, world! It's the server's answer: we've seen 1234 requests, and they're fine .",
    "Größe, naïve café, Ελληνικά, русский текст, 日本語のテキスト, 한국어, العربية, 🎉🎉 emoji.",
    "def prefill(prompt: str) -> int:\n    return len(prompt)\n\n\tx = {'a': [1, 2, 3]}",
]
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]


@functools.cache
def byte_level() -> Tokenizer:
    """Return the tokenizer of the embedded model, with a token for each byte and for longer pieces."""
    with tempfile.TemporaryDirectory() as name:
        write_tiny_files(Path(name))
        return Tokenizer.load(name)


@functools.cache
def byte_fallback() -> Tokenizer:
    """Return a tokenizer like that of Llama 2: words that begin with a space, and tokens for the bytes of the rest."""
    words = [*SPECIAL_TOKENS, *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁Hello", "▁world", "Hello", ",", "a", "b", "▁a", "▁b", "é"]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    rust = RustTokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    rust.decoder = fallback_decoder()
    rust.add_special_tokens(SPECIAL_TOKENS)
    return Tokenizer(rust)


def fallback_decoder() -> Any:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def write_files(directory: Path, rust: RustTokenizer, settings: dict[str, Any], **other_files: Any) -> Path:
    """Write a tokenizer in the files of a published model. A keyword of `other_files` is a name without `.json`."""
    directory.mkdir(exist_ok=True)
    rust.save(str(directory / "tokenizer.json"))
    files = {
        "config": {"model_type": "llama"},
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", **settings},
        **other_files,
    }
    for name, tree in files.items():
        (directory / f"{name}.json").write_text(json.dumps(tree))
    return directory


def write_tiny(directory: Path) -> Path:
    """Write the tokenizer of the embedded model."""
    directory.mkdir(exist_ok=True)
    write_tiny_files(directory)
    return directory


def write_llama3_like(directory: Path) -> Path:
    """Write a tokenizer of bytes with BPE, a start-of-text token before each text, and added tokens for chats."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    )
    rust.add_special_tokens(special)
    rust.add_tokens([AddedToken("<tool>", normalized=False)])
    begin = special[0]
    rust.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, rust.token_to_id(begin))]
    )
    rust.enable_truncation(4)  # must have no effect on prompts, and neither must the padding
    rust.enable_padding(length=20)
    return write_files(
        directory,
        rust,
        {"bos_token": begin, "eos_token": "<|eot_id|>", "clean_up_tokenization_spaces": True, "add_bos_token": False},
    )


def write_bert_like(directory: Path) -> Path:
    """Write a tokenizer of pieces of lower-case words. Decoding puts spaces between words, and removes some of them."""
    rust = RustTokenizer(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    rust.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    rust.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    names = ("unk_token", "cls_token", "sep_token", "pad_token", "mask_token")
    return write_files(
        directory, rust, {**dict(zip(names, special, strict=True)), "clean_up_tokenization_spaces": True}
    )


def write_unigram(directory: Path, prepend_scheme: str, *, byte_fallback: bool) -> Path:
    """Write a tokenizer in the form that SentencePiece has."""
    rust = RustTokenizer(models.Unigram())
    rust.normalizer = normalizers.NFKC()
    rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=prepend_scheme)
    rust.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False),
    )
    tree = json.loads(rust.to_str())
    if byte_fallback:
        tree["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
        tree["model"]["byte_fallback"] = True
    rust = RustTokenizer.from_str(json.dumps(tree))
    metaspace = decoders.Metaspace(replacement="▁", prepend_scheme=prepend_scheme)
    rust.decoder = fallback_decoder() if byte_fallback else metaspace
    return write_files(directory, rust, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def write_llama2_like(directory: Path) -> Path:
    """Write a tokenizer of words in BPE, whose normalizer adds a space before the text, with bytes for the rest."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    rust = RustTokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=[*SPECIAL_TOKENS, *byte_tokens], show_progress=False)
    rust.train_from_iterator(CORPUS[:2], trainer)
    tree = json.loads(rust.to_str())
    tree["added_tokens"] = tree["added_tokens"][: len(SPECIAL_TOKENS)]  # bytes are no special tokens
    rust = RustTokenizer.from_str(json.dumps(tree))
    rust.decoder = fallback_decoder()
    rust.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return write_files(directory, rust, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True})


def write_added_in_settings(directory: Path) -> Path:
    """Write a tokenizer with tokens that only tokenizer_config.json has, and one that has other flags there."""
    rust = RustTokenizer.from_file(str(write_tiny(directory) / "tokenizer.json"))
    rust.add_tokens(["<think>"])
    flags = {"lstrip": False, "rstrip": False, "single_word": False}
    return write_files(
        directory,
        rust,
        {
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", **flags, "normalized": False},
            "image_token": "<image>",
            "additional_special_tokens": ["<|extra|>"],
            "added_tokens_decoder": {
                "512": {"content": "<think>", **flags, "normalized": False, "special": False},
                "513": {"content": "<late>", **flags, "rstrip": True, "normalized": False, "special": True},
            },
        },
    )


def write_legacy(directory: Path) -> Path:
    """Write a tokenizer with added tokens in separate files, as transformers wrote them before version 4.34."""
    rust = RustTokenizer.from_file(str(write_tiny(directory) / "tokenizer.json"))
    return write_files(
        directory,
        rust,
        {"unk_token": "<|endoftext|>"},
        special_tokens_map={"eos_token": {"content": "<eos>", "lstrip": False, "rstrip": True, "normalized": False}},
        added_tokens={"<eos>": 512, "<word>": 513},
    )


def write_without_json(directory: Path) -> Path:
    """Write a tokenizer in the files of GPT-2, which is older than `tokenizer.json`."""
    tree = json.loads((write_tiny(directory) / "tokenizer.json").read_text())
    model, added = tree["model"], {token.pop("id"): token for token in tree["added_tokens"]}
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(model["vocab"]))
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, model["merges"])]))
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": added})
    )
    return directory


WRITERS = {
    "tiny": write_tiny,
    "llama3": write_llama3_like,
    "bert": write_bert_like,
    "llama2": write_llama2_like,
    "unigram-first": functools.partial(write_unigram, prepend_scheme="first", byte_fallback=True),
    "unigram-always": functools.partial(write_unigram, prepend_scheme="always", byte_fallback=False),
    "unigram-never": functools.partial(write_unigram, prepend_scheme="never", byte_fallback=True),
    "settings": write_added_in_settings,
    "legacy": write_legacy,
}
