"""The files of a model directory, checked and read without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

INDEX = "model.safetensors.index.json"


def check_servable(path: str | Path) -> int:
    """Check, without torch, that a directory has a config.json and the safetensors of a model.

    Returns:
        Bytes of the weights.

    Raises:
        ConfigError: a file is missing or can't be read. The message names it.
    """
    directory = Path(path)
    if not os.path.isfile(directory / "config.json"):  # which also takes names that are too long, unlike Path
        raise ConfigError(f"model.path: expected `tiny` or a directory with a config.json, got {path}")
    read_object(directory / "config.json")
    index = directory / INDEX
    names = {"model.safetensors"}
    if index.is_file() and not (directory / "model.safetensors").is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: weight_map: expected a file for each weight, got {shown(weight_map)}")
        names = {str(name) for name in weight_map.values()}
    for name in sorted(names):
        if not (directory / name).is_file():
            raise ConfigError(f"model.path: expected a directory with {name}, got {path} without it")
    return sum((directory / name).stat().st_size for name in names)


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ConfigError: it can't be read, or holds something else.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model: expected a directory with a config.json, or such a file, got {file}: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected a JSON object, got text that is not JSON ({error})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {shown(tree)}")
    return tree


def shown(value: object) -> str:
    """A value as error messages show it: its type and at most 60 characters.

    >>> shown([1, 2])
    'list [1, 2]'
    """
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 60 else text[:57] + "..."
