"""A model's own tokenizer, loaded from files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError
from radixkv.service.missing_package import MissingPackage
from radixkv.service.text import DEFAULT_TEMPLATE
from radixkv.service.text.answer_format import AnswerFormat
from radixkv.service.text.clean_up import CleanUp, clean_up_tokenization
from radixkv.service.text.reasoning import REASONING_FORMATS, reasoning_format_of
from radixkv.service.text.text_stream import BROKEN, TextStream
from radixkv.service.text.tool_formats import AUTOMATIC, TOOL_FORMATS, tool_format_of
from radixkv.service.text.transformers_tokenizer import SlowBackend, load_with_transformers

if TYPE_CHECKING:
    import tokenizers

    from radixkv.service.text.chat_template import ChatTemplate

_EXTRA = "text"
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # a byte in tokenizers of SentencePiece
# Byte-level tokenizers map each byte to a character: itself if it is printable, or else one from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_NOT_PRINTABLE = tuple(each for each in range(256) if each not in _PRINTABLE)
_BYTE_OF_CHAR = {chr(each): each for each in _PRINTABLE}
_BYTE_OF_CHAR |= {chr(0x100 + index): each for index, each in enumerate(_NOT_PRINTABLE)}
_MAX_CACHED_TOKENS = 65_536
_TOOLS_TEMPLATE = "tool_use"  # name of the chat template for conversations with tools, in models that have several


class Tokenizer:
    """Converts text to token ids and back. Special tokens have no text.

    It needs the packages tokenizers and, for conversations, jinja2. Token ids, text and rendered conversations are the
    same as with `AutoTokenizer` of transformers. Safe to share between threads, as long as each completion has its own
    text stream.

    Args:
        backend: the tokenizer itself.
        special_tokens: text of special tokens by name, such as `bos_token`; chat templates use them.
        chat_templates: sources of Jinja templates by name; see `DEFAULT_TEMPLATE`.
        response_template: how the model writes its answers, as JSON text in transformers' form; empty if not given.
        is_cleaned_up: whether spaces before punctuation are removed from text, as some models' configurations require.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | SlowBackend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        response_template: str = "",
        is_cleaned_up: bool = False,
    ) -> None:
        self._backend = backend
        self._special_tokens = special_tokens or {}
        self._template_sources = chat_templates or {}
        self._templates: dict[str, ChatTemplate] = {}
        self._response_template = response_template
        self._is_cleaned_up = is_cleaned_up
        self._cached_tokens: dict[int, tuple[str, bytes]] = {}  # text and bytes by id

    @classmethod
    def load(cls, source: str | Path) -> Self:
        """Load a tokenizer from files. Nothing is downloaded, and no code in them is run.

        Directories with `tokenizer.json`, and GGUF files, need the package tokenizers alone. Other directories are read
        by transformers.

        Args:
            source: a directory with a tokenizer, a GGUF file, or `ORG/NAME` of a model in the local cache of Hugging
                Face.

        Raises:
            MissingPackage: a package that these files need is not installed.
            ValueError: there is no tokenizer that can be loaded.
        """
        if os.path.isdir(source):
            return cls._load_directory(Path(source))
        from radixkv.model_files.hub_cache import HubName
        from radixkv.model_files.model_location import files_directory

        if not os.path.isfile(source) and not str(source).lower().endswith(".gguf") and not HubName.parse(str(source)):
            raise ValueError(f"expected a directory with a tokenizer, got {source}")
        try:
            directory = files_directory(source)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("model.path: ")) from error
        return cls._load_directory(directory)

    @classmethod
    def _load_directory(cls, directory: Path) -> Self:
        try:
            has_json = (directory / "tokenizer.json").is_file()
            return cls._load_json(directory) if has_json else cls._load_transformers(directory)
        except ModuleNotFoundError:
            raise
        except Exception as error:  # the package tokenizers raises no narrower type
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ValueError(f"expected a directory with a tokenizer, got {directory}: {reason}") from error

    @classmethod
    def _load_json(cls, directory: Path) -> Self:
        try:
            from radixkv.service.text.tokenizer_directory import TokenizerDirectory
        except ModuleNotFoundError as error:
            raise MissingPackage(missing_package("tokenizers", _EXTRA), name="tokenizers") from error
        files = TokenizerDirectory.read(directory)
        return cls(
            files.backend,
            special_tokens=files.special_tokens,
            chat_templates=files.chat_templates,
            response_template=files.response_template,
            is_cleaned_up=files.is_cleaned_up,
        )

    @classmethod
    def _load_transformers(cls, directory: Path) -> Self:
        try:
            tokenizer = load_with_transformers(directory)
        except ModuleNotFoundError as error:
            install = missing_package("transformers", "engine")
            message = f"there is no tokenizer.json in {directory}; for a tokenizer in other files, {install}"
            raise MissingPackage(message, name=error.name) from error
        templates = getattr(tokenizer, "chat_template", None) or {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return cls(
            SlowBackend(tokenizer) if backend is None else backend,
            special_tokens=tokenizer.special_tokens_map,
            chat_templates={DEFAULT_TEMPLATE: templates} if isinstance(templates, str) else templates,
            is_cleaned_up=backend is None and bool(tokenizer.clean_up_tokenization_spaces),
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that the model requires before or after it.

        Raises:
            ValueError: the text contains surrogates, which UTF-8 cannot encode.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, rendered by the model's chat template.

        Args:
            messages: in the form of OpenAI's API: each with a `role`, such as `system`, `user` or `assistant`, its
                `content` (text, a list of parts of the type text, or None), and other keys that the template reads,
                such as `tool_calls`. Other values of None count as absent.
            tools: JSON schemas of functions that the model may call, in the form of OpenAI's API.
            documents: texts that the answer may be based on.
            add_generation_prompt: end with the tokens that begin the model's message.
            chat_template_kwargs: further variables of the template, such as `enable_thinking`.

        Raises:
            MissingPackage: jinja2 is not installed.
            TypeError: an argument contains values other than strings, numbers, lists and mappings.
            ValueError: the model has no chat template, or the template rejects the messages, or would drop an argument,
                such as the tools.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.encode_rendered(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation. The arguments and exceptions are those of `encode_chat`."""
        return self._template(has_tools=tools is not None).render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=chat_template_kwargs,
        )

    def encode_rendered(self, text: str) -> list[int]:
        """Return the token ids of a rendered conversation, which contains all special tokens that the model requires.

        Raises:
            ValueError: the text contains surrogates, which UTF-8 cannot encode.
        """
        return self._encode(text, add_special_tokens=False)

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids of a rendered conversation, and where the text of each token ends in it.

        There are no ends with one of transformers' slow tokenizers, which are written in Python.

        Raises:
            ValueError: the text contains surrogates, which UTF-8 cannot encode.
        """
        encoding = self._encoding(text, add_special_tokens=False)
        if isinstance(self._backend, SlowBackend):
            return list(encoding.ids), []
        return list(encoding.ids), [end for _, end in encoding.offsets]

    def turn_end(self) -> tuple[str, int] | None:
        """Return the special token that the chat template writes after an answer, and its id.

        A model that was trained on such conversations ends its answers with it.

        Returns:
            The token and its id; None if jinja2 is not installed, if there is no template, if it refuses a short
            conversation, or if no special token comes directly after the answer, apart from white space.
        """
        answer = "an answer that no template contains"
        messages = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        try:
            text = self._template(has_tools=False).render(messages, add_generation_prompt=False)
        except (ModuleNotFoundError, ValueError):
            return None
        _, separator, after = text.rpartition(answer)
        ids = self._encode(after.lstrip(), add_special_tokens=False) if separator else []
        if not ids or self._decode(ids[:1]):  # special tokens have no text
            return None
        token = self._backend.id_to_token(ids[0])
        return None if token is None else (token, ids[0])

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template."""
        return bool(self._template_sources)

    def has_template_variable(self, name: str) -> bool:
        """Return whether a variable, such as `enable_thinking`, occurs in the default chat template.

        Raises:
            MissingPackage: jinja2 is not installed.
            ValueError: the model has no default chat template, or it is not valid.
        """
        return self._template(has_tools=False).has_variable(name)

    def answer_format(self, tools: str = AUTOMATIC, reasoning: str = AUTOMATIC) -> AnswerFormat:
        """Return how the model writes its answers.

        Args:
            tools: name of the format of tool calls; `auto` recognizes the format by the chat template and the response
                template, and `none` means that there is no format.
            reasoning: name of the format of reasoning; `auto` and `none` as for `tools`.
        """
        chat_template = self._template_sources.get(_TOOLS_TEMPLATE) or self._template_sources.get(DEFAULT_TEMPLATE, "")
        template = chat_template + self._response_template
        tool_format = tool_format_of(template, self._added_tokens()) if tools == AUTOMATIC else TOOL_FORMATS.get(tools)
        reasoning_format = reasoning_format_of(template) if reasoning == AUTOMATIC else REASONING_FORMATS.get(reasoning)
        texts: tuple[str, ...] = ()
        if tool_format is not None:
            texts += (*tool_format.variants, tool_format.prefix, tool_format.suffix, tool_format.quote)
        if reasoning_format is not None:
            texts += (reasoning_format.begin, reasoning_format.end)
        tags = {tag: token_id for tag, token_id in self._special_ids.items() if any(tag in text for text in texts)}
        return AnswerFormat(tool_format, reasoning_format, tags)

    @cached_property
    def special_tokens(self) -> Mapping[int, str]:
        """The texts of special tokens by their ids."""
        return {token_id: text for text, token_id in self._special_ids.items()}

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is no such token."""
        return self._special_ids.get(text)

    def named_id(self, name: str) -> int | None:
        """Return the id of the special token with this name in the model's files, such as `bos_token`, or None."""
        return self.special_id(self._special_tokens.get(name, ""))

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        added = self._backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @property
    def definition(self) -> str:
        """The tokenizer as JSON, in the format of the package `tokenizers`.

        Raises:
            ValueError: it is one of transformers' slow tokenizers, which are written in Python.
        """
        return str(self._backend.to_str())

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids. Ids outside the vocabulary have no text."""
        text = self._decode(list(token_ids))
        return clean_up_tokenization(text) if self._is_cleaned_up else text

    def token_text(self, token_id: int) -> str:
        """Return the text that a token adds after other text, with its leading space. Special tokens have no text.

        A part of a character is U+FFFD.
        """
        return self._text_and_bytes(token_id)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character. Special tokens have no bytes."""
        return self._text_and_bytes(token_id)[1]

    def _text_and_bytes(self, token_id: int) -> tuple[str, bytes]:
        """Return the text and the bytes of a token."""
        cached = self._cached_tokens.get(token_id)
        if cached is not None:
            return cached
        # Decoders of SentencePiece remove the space at the beginning of a text, so the token is decoded after a letter.
        before = self._decode(self._letter_ids)
        text = self._decode([*self._letter_ids, token_id])
        text = text[len(before) :] if text.startswith(before) else self._decode([token_id])
        token = text, self._bytes(token_id, text)
        if len(self._cached_tokens) < _MAX_CACHED_TOKENS:
            self._cached_tokens[token_id] = token
        return token

    def _bytes(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token with this text."""
        if BROKEN not in text:
            return text.encode()
        token = self._backend.id_to_token(token_id) or ""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        if all(each in _BYTE_OF_CHAR for each in token):
            return bytes(_BYTE_OF_CHAR[each] for each in token)
        return text.encode()

    def stream(self, prompt_ids: Sequence[int] = (), shown: Mapping[int, str] | None = None) -> TextStream:
        """Return a stream for the text of one completion.

        Args:
            prompt_ids: the tokens before the completion. The last ones determine whether the text begins with a space.
            shown: texts of the special tokens that are not left out of the text, by their ids.
        """
        return TextStream(self._decode, prompt_ids, CleanUp() if self._is_cleaned_up else None, shown)

    @cached_property
    def _letter_ids(self) -> list[int]:
        """The tokens of a text that ends in a letter."""
        return self._encode("a", add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._encoding(text, add_special_tokens=add_special_tokens).ids)

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Any:
        try:
            text.encode()
        except UnicodeEncodeError:  # its message would contain the text
            raise ValueError("expected text in Unicode, got lone surrogates") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def _added_tokens(self) -> set[str]:
        return {token.content for token in self._backend.get_added_tokens_decoder().values()}

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(token_ids))

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        try:
            from radixkv.service.text.chat_template import ChatTemplate
        except ModuleNotFoundError as error:
            raise MissingPackage(missing_package("jinja2", _EXTRA), name="jinja2") from error
        name = _TOOLS_TEMPLATE if has_tools and _TOOLS_TEMPLATE in self._template_sources else DEFAULT_TEMPLATE
        if name not in self._template_sources:
            names = f"only {', '.join(sorted(self._template_sources))}" if self._template_sources else "none"
            raise ValueError(f"expected a tokenizer with a default chat template, got {names}")
        if name not in self._templates:
            source = self._template_sources[name]
            tool_format = tool_format_of(source, self._added_tokens())
            write_calls = None if tool_format is None else tool_format.write
            self._templates[name] = ChatTemplate(source, self._special_tokens, write_calls=write_calls)
        return self._templates[name]
