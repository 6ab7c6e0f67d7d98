"""Reads the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

INDEX = "model.safetensors.index.json"

_MAX_SHOWN_CHARACTERS = 60


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model: expected a directory with a config.json, or such a file, got {file}: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {shown(value)}")
    return value


def shown(value: object) -> str:
    """Format a value for an error message, as its type and its repr, in at most 60 characters.

    >>> shown([1, 2])
    'list [1, 2]'
    """
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[: _MAX_SHOWN_CHARACTERS - 3] + "..."
