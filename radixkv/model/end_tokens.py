"""The tokens that end a generation, according to the files of a model."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from radixkv.config.model_directory import read_object

_log = logging.getLogger(__name__)

GENERATION_CONFIG, CONFIG, TOKENIZER_CONFIG = "generation_config.json", "config.json", "tokenizer_config.json"
_SPECIAL_TOKENS, _TOKENIZER = "special_tokens_map.json", "tokenizer.json"


def end_token_ids(directory: Path, vocab_size: int) -> frozenset[int]:
    """Return all end-of-sequence tokens that the files in a directory name.

    Logs a warning if these are more than the tokens of the file that transformers prefers.

    Files of fine-tuned models often disagree: their tokenizer ends turns with another token than generation_config.json
    states. The model may emit any of these tokens, so all of them end a generation. Ids outside of the vocabulary are
    ignored: some models with a reduced vocabulary keep the id of the original vocabulary, or use -1 for none.

    Raises:
        ConfigError: a file cannot be read, or is not a JSON object.
    """
    ids_by_file = {
        source: frozenset(token_id for token_id in ids if 0 <= token_id < vocab_size)
        for source, ids in _ids_by_file(directory).items()
    }
    ids_by_file = {source: ids for source, ids in ids_by_file.items() if ids}
    all_ids = frozenset[int]().union(*ids_by_file.values())
    preferred_ids = next(iter(ids_by_file.values()), all_ids)  # those that transformers uses
    if all_ids != preferred_ids:
        sources = ", ".join(f"{source} names {_format_ids(ids)}" for source, ids in ids_by_file.items())
        _log.warning(
            "the files of the model name different end-of-sequence tokens: %s. Each of them ends a generation. If one "
            "should not, correct the file; `ignore_eos` and `stop_token_ids` override them per request",
            sources,
        )
    return all_ids


def _ids_by_file(directory: Path) -> dict[str, list[int]]:
    """Return the ids by the file that names them, in the order in which transformers prefers them."""
    generation, config = _read_if_present(directory / GENERATION_CONFIG), _read_if_present(directory / CONFIG)
    text_config = config.get("text_config")
    configs = [config, text_config] if isinstance(text_config, dict) else [config]
    return {
        GENERATION_CONFIG: _as_ids(generation.get("eos_token_id")),
        CONFIG: [token_id for each in configs for token_id in _as_ids(each.get("eos_token_id"))],
        "the tokenizer": _tokenizer_ids(directory),
    }


def _tokenizer_ids(directory: Path) -> list[int]:
    """Return the id of the tokenizer's `eos_token`; an empty list if no file contains it."""
    settings = _read_if_present(directory / TOKENIZER_CONFIG)
    token = settings.get("eos_token") or _read_if_present(directory / _SPECIAL_TOKENS).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return []
    added = settings.get("added_tokens_decoder")
    if isinstance(added, dict):
        keys = [key for key, each in added.items() if isinstance(each, dict) and each.get("content") == content]
        if keys and keys[0].isdecimal():
            return [int(keys[0])]
    for name in ("added_tokens.json", "vocab.json"):
        token_id = _read_if_present(directory / name).get(content)
        if isinstance(token_id, int):
            return [token_id]
    return _ids_in_tokenizer_json(_read_if_present(directory / _TOKENIZER), content)


def _ids_in_tokenizer_json(tokenizer: Mapping[str, Any], content: str) -> list[int]:
    for each in tokenizer.get("added_tokens") or ():
        if isinstance(each, dict) and each.get("content") == content:
            return _as_ids(each.get("id"))
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        return _as_ids(vocab.get(content))
    pieces = vocab if isinstance(vocab, list) else ()  # a list of pairs of text and score
    ids = [index for index, piece in enumerate(pieces) if piece and piece[0] == content]
    return ids[:1]


def _as_ids(value: object) -> list[int]:
    """Return the ids in a JSON value, which may be one id or a list; other values are ignored."""
    values: Iterable[object] = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, int) and not isinstance(each, bool)]


def _read_if_present(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _format_ids(ids: Iterable[int]) -> str:
    return json.dumps(sorted(ids))
