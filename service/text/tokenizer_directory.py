"""Reads a directory with `tokenizer.json` in the same way as transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from radixkv.service.text import DEFAULT_TEMPLATE

_TEMPLATES_FOLDER = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class TokenizerDirectory:
    """Contents of a tokenizer directory.

    Attributes:
        backend: the tokenizer of the package tokenizers.
        special_tokens: text of special tokens by name, such as `bos_token`.
        chat_templates: templates by name; the name of the unnamed one is `DEFAULT_TEMPLATE`.
        response_template: how the model writes its answers, as JSON text in transformers' form; if not given, the two
            characters `""`.
        is_cleaned_up: whether spaces before punctuation are removed from decoded text.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    response_template: str
    is_cleaned_up: bool

    @classmethod
    def read(cls, directory: Path) -> TokenizerDirectory:
        """Read `tokenizer.json` and the optional files next to it.

        Raises:
            OSError: a file cannot be read.
            Exception: `tokenizer.json` is invalid; the package tokenizers raises no narrower type.
            ValueError: another file is invalid.
        """
        settings = _json(directory / "tokenizer_config.json")
        backend = Backend.from_file(str(directory / "tokenizer.json"))
        special_tokens = _add_missing_tokens(backend, directory, settings)
        backend.no_truncation()  # prompts are never truncated silently
        backend.no_padding()
        backend.encode_special_tokens = bool(settings.get("split_special_tokens", False))
        response = json.dumps(settings.get("response_template") or "", ensure_ascii=False)
        templates = _chat_templates(directory, settings)
        return cls(backend, special_tokens, templates, response, _is_cleaned_up(backend, settings))


def _add_missing_tokens(backend: Backend, directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Add tokens that are only in the files next to `tokenizer.json`, and return the named special tokens.

    Older versions of transformers stored tokens that were added after training in separate files.
    """
    present = backend.get_added_tokens_decoder()
    added: dict[int, AddedToken] = {}  # by token id
    if "added_tokens_decoder" in settings:
        added = {
            int(token_id): AddedToken(**_fields(token)) for token_id, token in settings["added_tokens_decoder"].items()
        }
    else:
        for name, value in _json(directory / "special_tokens_map.json").items():
            settings[name] = value
        special = {_content(value) for value in (*_named_tokens(settings).values(), *_unnamed_tokens(settings))}
        for content, token_id in _json(directory / "added_tokens.json").items():
            is_special = content in special
            added[token_id] = AddedToken(content, normalized=not is_special, special=is_special)
        added |= present
    by_content = {token.content: token for token in added.values()}
    named = {name: _to_token(value, by_content) for name, value in _named_tokens(settings).items()}
    unnamed = [_to_token(value, by_content) for value in _unnamed_tokens(settings)]

    # A token that `tokenizer.json` has with other flags is added again, with those of `settings`.
    present_with_flags = {repr(token) for token in present.values()}  # a repr includes the flags of the token
    missing = [token for _, token in sorted(added.items()) if repr(token) not in present_with_flags]
    contents = {token.content for token in (*present.values(), *missing)}
    for token in (*named.values(), *unnamed):
        if token.content not in contents:
            missing.append(token)
            contents.add(token.content)

    named_contents = {token.content for token in named.values()}
    for token in missing:
        token.special = token.special or token.content in named_contents
    backend.add_tokens(missing)
    return {name: token.content for name, token in named.items()}


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries for named special tokens, including model-specific ones, such as `image_token`."""
    tokens = {name: value for name, value in settings.items() if name.endswith("_token") and _is_token(value)}
    extra = settings.get("extra_special_tokens")
    return tokens | (extra if isinstance(extra, dict) else {})


def _unnamed_tokens(settings: Mapping[str, Any]) -> list[Any]:
    """Return the entries for special tokens without a name."""
    for name in ("extra_special_tokens", "additional_special_tokens"):
        if isinstance(settings.get(name), list) and settings[name]:
            return list(settings[name])
    return []


def _is_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _content(value: Any) -> str:
    return str(value if isinstance(value, str) else value["content"])


def _to_token(value: Any, by_content: Mapping[str, AddedToken]) -> AddedToken:
    """Convert an entry for a special token, a string or an object; flags come from `by_content` if it has the token."""
    content = _content(value)
    if content in by_content:
        return by_content[content]
    return (
        AddedToken(content, special=True)
        if isinstance(value, str)
        else AddedToken(**_fields(value) | {"special": True})
    )


def _fields(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name not in ("__type", "id")}


def _chat_templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates. As in transformers, files take precedence over the configuration."""
    files = {path.stem: path for path in sorted((directory / _TEMPLATES_FOLDER).glob("*.jinja"))}
    if (path := directory / "chat_template.jinja").is_file():
        files[DEFAULT_TEMPLATE] = path
    if files:
        return {name: path.read_text("utf-8") for name, path in files.items()}
    templates = settings.get("chat_template") or _json(directory / "chat_template.json").get("chat_template")
    if isinstance(templates, list):
        templates = {each["name"]: each["template"] for each in templates}
    if isinstance(templates, str):
        templates = {DEFAULT_TEMPLATE: templates}
    return templates or {}


def _is_cleaned_up(backend: Backend, settings: Mapping[str, Any]) -> bool:
    """Return whether text is cleaned up. Like transformers, ignore the setting for BPE, where it would corrupt text."""
    even_bpe = settings.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(settings.get("clean_up_tokenization_spaces")) and (bool(even_bpe) or not isinstance(backend.model, BPE))


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no file."""
    if not path.is_file():
        return {}
    tree = json.loads(path.read_text("utf-8"))
    if not isinstance(tree, dict):
        raise ValueError(f"{path.name}: expected an object, got {type(tree).__name__}")
    return tree
