"""Tokenizers without `tokenizer.json`, loaded by transformers, which takes seconds and imports torch."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_REASON_CHARS = 200


def load_with_transformers(directory: Path) -> Any:
    """Return the tokenizer of transformers. Nothing is downloaded, and no code in the directory is run.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        ValueError: transformers cannot read the files; the message has the reason.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises exceptions of many types
        raise ValueError(_reason(directory, error)) from error


def converted_files(directory: Path) -> Mapping[str, bytes] | None:
    """Convert a tokenizer to `tokenizer.json` and the files that belong to it.

    Returns:
        Contents by file name, which may include a folder; None if the tokenizer cannot be converted.

    Raises:
        ModuleNotFoundError, ValueError: as `load_with_transformers`.
    """
    tokenizer = load_with_transformers(directory)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    with tempfile.TemporaryDirectory(prefix="radixkv-") as folder:
        tokenizer.save_pretrained(folder)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@dataclass(frozen=True, slots=True)
class _Encoding:
    ids: list[int]


class SlowBackend:
    """A tokenizer written in Python, with the methods of the package tokenizers that `Tokenizer` calls.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> _Encoding:
        """Return the token ids of a text."""
        return _Encoding(list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token of an id; None if it is not in the vocabulary."""
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return token

    def get_added_tokens_decoder(self) -> Mapping[int, Any]:
        """Return the added tokens by their ids; each has `content`, and `special`: whether it has no text."""
        tokens: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        return tokens

    def to_str(self) -> str:
        """Not supported, because there is no JSON format.

        Raises:
            ValueError: always.
        """
        raise ValueError("the tokenizer has no tokenizer.json; only transformers can run it")


def _reason(directory: Path, error: Exception) -> str:
    """Return the first line of an error of transformers.

    If the package sentencepiece is missing, return how to install it: transformers names a package that is not needed.
    """
    is_sentencepiece = (directory / "tokenizer.model").is_file() and not (directory / "tokenizer.json").is_file()
    if is_sentencepiece and importlib.util.find_spec("sentencepiece") is None:
        return "to read its tokenizer.model, pip install sentencepiece"
    return str(error).strip().partition("\n")[0][:_MAX_REASON_CHARS] or type(error).__name__
