"""A model's own tokenizer, loaded from files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from radixkv.config.needed_package import missing_package
from radixkv.service.missing_package import MissingPackage
from radixkv.service.text.text_stream import TextStream

_EXTRA = "text"
_MOST_REASON_CHARS = 200


class Tokenizer:
    """Turns text into token ids and back. Special tokens have no text.

    Safe to share between threads as long as each has text streams of its own.

    Args:
        model: a tokenizer of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @classmethod
    def load(cls, directory: str | Path) -> Self:
        """Load a tokenizer from the files of a directory. Nothing is downloaded, and no code in it is run.

        Raises:
            MissingPackage: transformers is not installed.
            ValueError: there is no tokenizer that transformers can load.
        """
        if not os.path.isdir(directory):  # which transformers would take for a name on a hub
            raise ValueError(f"expected a directory with a tokenizer, got {directory}")
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError as error:
            raise _missing(error.name or "transformers") from error
        try:
            return cls(AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # whatever transformers raises over a bad directory
            reason = _reason(Path(directory), error)
            raise ValueError(f"expected a directory with a tokenizer, got {directory}: {reason}") from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model wants before or after it."""
        return list(self._model.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation by the model's chat template, up to where the model's answer begins.

        Args:
            messages: each with a `role`, such as `system`, `user` or `assistant`, and its `content`.

        Raises:
            MissingPackage: jinja2 is not installed.
            ValueError: the model has no chat template, or the template refuses these messages.
        """
        try:
            import jinja2
        except ModuleNotFoundError as error:
            raise _missing("jinja2") from error
        if not self.has_chat_template:
            raise ValueError("expected a tokenizer with a chat template, got one without")
        try:
            text = self._model.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise ValueError(f"expected messages that the chat template takes, got its refusal: {error}") from error
        return list(self._model.encode(text, add_special_tokens=False))

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return bool(getattr(self._model, "chat_template", None))

    @property
    def definition(self) -> str:
        """All of it as JSON, in the form of the package tokenizers.

        Raises:
            ValueError: it is of another package.
        """
        backend = getattr(self._model, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("expected a tokenizer of the package tokenizers, got another one")
        return str(backend.to_str())

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, every blank as the model wrote it."""
        return str(
            self._model.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False),
        )

    def stream(self, prompt_ids: Sequence[int] = ()) -> TextStream:
        """Return a stream for the text of one answer.

        Args:
            prompt_ids: the tokens before the answer, of which the last ones decide about a blank at its start.
        """
        return TextStream(self.decode, prompt_ids)


def _reason(directory: Path, error: Exception) -> str:
    """The first line of an error. For files of SentencePiece, transformers asks for a package that it does not need."""
    is_sentencepiece = (directory / "tokenizer.model").is_file() and not (directory / "tokenizer.json").is_file()
    if is_sentencepiece and importlib.util.find_spec("sentencepiece") is None:
        return "to read its tokenizer.model, pip install sentencepiece"
    return str(error).strip().partition("\n")[0][:_MOST_REASON_CHARS] or type(error).__name__


def _missing(package: str) -> MissingPackage:
    return MissingPackage(missing_package(package, _EXTRA), name=package)
