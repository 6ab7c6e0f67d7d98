"""Converts the tokenizer of a GGUF file to files that the package tokenizers and transformers read.

A GGUF file contains a vocabulary and the name of a pre-tokenizer. transformers converts them as well, but without the
rules that llama.cpp derives from the name: whether digits are split, whether a word that is a token is used without
merges, and whether a BOS token is added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError
from radixkv.model_files.gguf_file import GgufFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"  # stands for a space in vocabularies of SentencePiece
_REMEDY = "serve the model from a directory of Hugging Face"

# Parts of the regular expressions of words.
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_SYMBOLS_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """The rules for a name in `tokenizer.ggml.pre`, as in llama.cpp, by which text is split into words before BPE.

    Attributes:
        pattern: regular expression of a word; empty for that of GPT-2.
        splits_digits: whether each digit is a word.
        ignores_merges: whether a word that is a token is used without merges.
        adds_bos: whether a BOS token is added if the file does not specify it.
        normalizes: whether text is normalized (NFC) before it is split.
    """

    pattern: str = ""
    splits_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False
    normalizes: bool = False


_CL100K = _PreTokenizer(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}")
_LLAMA3 = _PreTokenizer(_CL100K.pattern, ignores_merges=True, adds_bos=True)
_QWEN2 = _PreTokenizer(rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_SYMBOLS}", normalizes=True)
_TEKKEN = _PreTokenizer(rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SYMBOLS_WITH_SLASH}", ignores_merges=True, adds_bos=True)
_O200K = _PreTokenizer(rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_SYMBOLS_WITH_SLASH}")
_PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "gpt2"), _PreTokenizer()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _PreTokenizer(splits_digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _CL100K),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
}


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and the chat templates by name; nothing if there is no vocabulary.

    Raises:
        ConfigError: the kind of tokenizer is not supported, its vocabulary is damaged, or the package tokenizers is
            missing.
    """
    values = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind = values.get("model", "none")
    if kind in ("none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"{file.path}: tokenizer.ggml.model: expected gpt2 or llama, got {kind}: {_REMEDY}")
    try:
        vocabulary = _GgufVocabulary(file, values)
        tokenizer = vocabulary.create_byte_level() if kind == "gpt2" else vocabulary.create_sentencepiece()
        vocabulary.add_tokens(tokenizer)
        text: str = tokenizer.to_str()
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        raise ConfigError(f"{file.path}: to read its tokenizer, {missing_package('tokenizers', 'text')}") from error
    except Exception as error:  # the package tokenizers raises plain Exception
        raise ConfigError(f"{file.path}: its tokenizer is damaged: {str(error)[:200]}: {_REMEDY}") from error
    settings = json.dumps(vocabulary.settings(), ensure_ascii=False, indent=1)
    return {"tokenizer.json": text.encode(), "tokenizer_config.json": settings.encode(), **_templates(file)}


def _templates(file: GgufFile) -> dict[str, bytes]:
    prefix, folder = "tokenizer.chat_template", "additional_chat_templates"
    files = {}
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{prefix}.")
        if key == prefix:
            files["chat_template.jinja"] = str(value).encode()
        elif name != key and name.replace("_", "").replace("-", "").isalnum():
            files[f"{folder}/{name}.jinja"] = str(value).encode()
    return files


class _GgufVocabulary:
    """The tokens of a file, and their types.

    One of the methods that create a tokenizer must be called first: they may change `_tokens` and `_adds_bos`.
    """

    def __init__(self, file: GgufFile, values: Mapping[str, Any]) -> None:
        self._file = file
        self._values = values
        self._is_gemma = file.architecture.startswith("gemma")
        self._tokens: Sequence[str] = values.get("tokens", ())
        self._types: Sequence[int] = values.get("token_type", ()) or (_NORMAL,) * len(self._tokens)
        if not self._tokens:
            raise ConfigError(f"{file.path}: tokenizer.ggml.tokens: expected a vocabulary, got none")
        if len(self._types) != len(self._tokens):
            raise ConfigError(
                f"{file.path}: tokenizer.ggml.token_type: expected one type for each token, got {len(self._types)} "
                f"types and {len(self._tokens)} tokens"
            )
        self._adds_bos = bool(values.get("add_bos_token", values["model"] == "llama"))

    def create_byte_level(self) -> Tokenizer:
        """Create a byte-level BPE tokenizer."""
        from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

        rules = self._pre_tokenizer()
        self._adds_bos = bool(self._values.get("add_bos_token", rules.adds_bos))
        merges = [tuple(each.split(" ", 1)) for each in self._values.get("merges", ())]
        vocab = {token: index for index, token in enumerate(self._tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=rules.ignores_merges))
        if rules.normalizes:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        if rules.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if rules.pattern:
            steps.append(pre_tokenizers.Split(Regex(rules.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules.pattern))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def create_sentencepiece(self) -> Tokenizer:
        """Create a SentencePiece BPE tokenizer with byte fallback."""
        from tokenizers import Tokenizer, decoders, models, normalizers

        if self._is_gemma:  # its vocabulary has tokens of several spaces, written as spaces
            self._tokens = [_SPACE * len(each) if each and not each.strip(" ") else each for each in self._tokens]
        vocab = {token: index for index, token in enumerate(self._tokens)}
        unknown = self._token("unknown_token_id")
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=self._merges(vocab), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        )
        replace_spaces = normalizers.Replace(" ", _SPACE)
        decoder_steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._values.get("add_space_prefix", True) and not self._is_gemma:
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace_spaces])
            decoder_steps.append(decoders.Strip(" ", 1, 0))  # the prepended space
        else:
            tokenizer.normalizer = replace_spaces
        tokenizer.decoder = decoders.Sequence(decoder_steps)
        return tokenizer

    def add_tokens(self, tokenizer: Tokenizer) -> None:
        """Add the control and user-defined tokens, which are never split, and the post-processor for BOS and EOS."""
        from tokenizers import AddedToken
        from tokenizers.processors import TemplateProcessing

        added_tokens = []
        for token, kind in zip(self._tokens, self._types, strict=True):
            # Gemma's tokens of several spaces remain ordinary tokens of the BPE, whatever their type.
            is_gemma_spaces = self._is_gemma and token and not token.strip(_SPACE)
            if kind in (_CONTROL, _USER_DEFINED) and not is_gemma_spaces:
                added_tokens.append(AddedToken(token, normalized=False, special=kind == _CONTROL))
        vocab_size = tokenizer.get_vocab_size()
        tokenizer.add_tokens(added_tokens)
        if tokenizer.get_vocab_size() != vocab_size:
            raise ValueError("a special token is not in the vocabulary")

        bos = self._token("bos_token_id") if self._adds_bos else None
        eos = self._token("eos_token_id") if self._values.get("add_eos_token", False) else None
        if bos is not None or eos is not None:
            # The templates of one text ($A) and of two texts; the numbers are token type ids.
            single = [f"{each}:0" for each in (bos, "$A", eos) if each is not None]
            pair = [*single, *(f"{each}:1" for each in (bos, "$B", eos) if each is not None)]
            special_tokens = [(each, tokenizer.token_to_id(each)) for each in (bos, eos) if each is not None]
            tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special_tokens)

    def settings(self) -> dict[str, Any]:
        """Return the entries of tokenizer_config.json."""
        gguf_names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        context_length = self._file.metadata.get(f"{self._file.architecture}.context_length")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": self._token(f"{gguf_name}_token_id") for name, gguf_name in gguf_names.items()},
            "clean_up_tokenization_spaces": False,
            **({} if context_length is None else {"model_max_length": context_length}),
        }

    def _pre_tokenizer(self) -> _PreTokenizer:
        name = self._values.get("pre")
        if name is None and self._file.architecture in ("qwen2", "qwen3"):  # files from before 2024 do not state it
            return _QWEN2
        if name not in _PRE_TOKENIZERS:
            raise ConfigError(
                f"{self._file.path}: tokenizer.ggml.pre: expected one of {', '.join(_PRE_TOKENIZERS)}, got "
                f"{name or 'none'}: {_REMEDY}, or convert it to GGUF again"
            )
        return _PRE_TOKENIZERS[name]

    def _token(self, key: str) -> str | None:
        token_id = self._values.get(key)
        if not isinstance(token_id, int) or not 0 <= token_id < len(self._tokens):
            return None
        return self._tokens[token_id]

    def _merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """Return the pairs of tokens that form another one, in the order in which SentencePiece would merge them.

        Complexity: up to two look-ups for each character of the vocabulary.
        """
        if "merges" in self._values:
            return [tuple(each.split(" ", 1)) for each in self._values["merges"]]
        scores = self._values.get("scores", ())
        if len(scores) != len(self._tokens):
            raise ValueError("tokenizer.ggml.scores: expected one for each token")
        pairs = []
        for index, (token, kind) in enumerate(zip(self._tokens, self._types, strict=True)):
            if kind in (_UNKNOWN, _CONTROL, _BYTE) or vocab[token] != index:
                continue
            rank = float(index) if self._is_gemma else -scores[index]
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocab and right in vocab:
                    pairs.append((rank, vocab[left], vocab[right], left, right))
        pairs.sort()
        return [(left, right) for *_, left, right in pairs]
