"""Checks and reads the files of a model directory without importing torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

INDEX = "model.safetensors.index.json"


def check_servable(path: str | Path) -> int:
    """Check that a directory has a config.json and all safetensors files of a model.

    Returns:
        Size of the weights in bytes.

    Raises:
        ConfigError: a file is missing or cannot be read. The message names it.
    """
    directory = Path(path)
    if not os.path.isfile(directory / "config.json"):  # unlike Path, it accepts names that are too long
        raise ConfigError(f"model.path: expected `tiny` or a directory with a config.json, got {path}")
    read_object(directory / "config.json")
    index = directory / INDEX
    names = {"model.safetensors"}
    if index.is_file() and not (directory / "model.safetensors").is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: weight_map: expected a table of file names, got {shown(weight_map)}")
        names = {str(name) for name in weight_map.values()}
    for name in sorted(names):
        if not (directory / name).is_file():
            raise ConfigError(f"model.path: {path} has no {name}")
    return sum((directory / name).stat().st_size for name in names)


def read_object(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ConfigError: the file cannot be read, or contains something else.
    """
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model: expected a directory with a config.json, or such a file, got {file}: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: expected a JSON object: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a JSON object, got {shown(tree)}")
    return tree


def shown(value: object) -> str:
    """Format a value for an error message, as its type and its repr, in at most 60 characters.

    >>> shown([1, 2])
    'list [1, 2]'
    """
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 60 else text[:57] + "..."
