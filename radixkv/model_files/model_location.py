"""Finds the files of a model: a directory, a GGUF file, or a model in the local cache of Hugging Face."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from radixkv.config.model_directory import INDEX, read_object, shown
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError
from radixkv.model_files.gguf_config import model_config
from radixkv.model_files.gguf_directory import gguf_directory
from radixkv.model_files.gguf_file import GgufFile, has_magic
from radixkv.model_files.hub_cache import HubName, hub_cache

_SUFFIX = ".gguf"
_EXPECTED = "`tiny`, a directory with a config.json, a GGUF file, or ORG/NAME of a downloaded model"


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """The location of a model whose files exist.

    Attributes:
        name: name of the directory, name of the GGUF file without its suffix, or `ORG/NAME` on the Hub.
        path: a directory, or a GGUF file.
        hub_name: the name on the Hub; None for a path.
    """

    name: str
    path: Path
    hub_name: HubName | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether the model is a GGUF file."""
        return self.path.is_file()

    def directory(self) -> Path:
        """Return a directory with config.json, the tokenizer, and, unless the model is a GGUF file, the weights.

        Raises:
            ConfigError: see `gguf_directory`.
        """
        return gguf_directory(self.path) if self.is_gguf else self.path


def locate(path: str | Path) -> ModelLocation:
    """Find a model.

    Args:
        path: a directory with a config.json, a GGUF file, or `ORG/NAME` or `ORG/NAME@REVISION` of the Hub.

    Raises:
        ConfigError: no model was found. The message names the searched places, and how to get the model.
    """
    text = str(path)
    if os.path.isfile(text):  # unlike `Path.is_file`, it accepts names that are too long
        return _locate_file(Path(text))
    if os.path.isdir(text):
        return _locate_in_directory(Path(text))
    name = HubName.parse(text)
    snapshot = None if name is None else name.snapshot()
    if name is not None and snapshot is not None:
        return _locate_in_snapshot(name, snapshot)
    if text.lower().endswith(_SUFFIX):
        raise ConfigError(
            f"model.path: expected a GGUF file, got {text}, which does not exist: download one, for example by "
            "hf download ORG/NAME FILE.gguf --local-dir ."
        )
    if name is None:
        raise ConfigError(f"model.path: expected {_EXPECTED}, got {text}")
    raise ConfigError(
        f"model.path: expected {_EXPECTED}, got {text}: there is no such directory, and {hub_cache()} has no "
        f"revision {name.revision} of such a model: to download it, {name.download_command}"
    )


def files_directory(path: str | Path) -> Path:
    """Return the directory with the tokenizer of a model, and with its config.json if it has one.

    Args:
        path: any directory, or see `locate`.

    Raises:
        ConfigError: there is no such model.
    """
    if os.path.isdir(path):
        return Path(path)
    name = None if os.path.isfile(path) else HubName.parse(str(path))
    snapshot = None if name is None else name.snapshot()
    if snapshot is not None and (snapshot / "tokenizer.json").is_file():  # only the tokenizer may have been downloaded
        return snapshot
    return locate(path).directory()


def check_servable(path: str | Path) -> int:
    """Check that a model has a config.json and all safetensors files, or that its GGUF file can be served.

    Returns:
        Size of the weights in bytes.

    Raises:
        ConfigError: a file or a package is missing, or a file cannot be read. The message names it.
    """
    location = locate(path)
    if location.is_gguf:
        file = GgufFile.read(location.path)
        model_config(file)  # for its checks
        require_package("model.path", "gguf", "gguf", "gguf")
        return sum(each.num_bytes for each in file.tensors.values())
    directory = location.path
    read_object(directory / "config.json")
    index = directory / INDEX
    weight_files = {"model.safetensors"}
    if index.is_file() and not (directory / "model.safetensors").is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: weight_map: expected a table of file names, got {shown(weight_map)}")
        weight_files = {str(name) for name in weight_map.values()}
    for name in sorted(weight_files):
        if not (directory / name).is_file():
            remedy = "" if location.hub_name is None else f": to download it, {location.hub_name.download_command}"
            raise ConfigError(f"model.path: {path} has no {name}{remedy}")
    return sum((directory / name).stat().st_size for name in weight_files)


def _locate_file(path: Path) -> ModelLocation:
    if path.suffix.lower() != _SUFFIX and not has_magic(path):  # some tools name GGUF files by their digests
        raise ConfigError(f"model.path: expected {_EXPECTED}, got the file {path}")
    return ModelLocation(path.stem, path)


def _locate_in_directory(directory: Path) -> ModelLocation:
    if not (directory / "config.json").is_file():
        gguf_files = _gguf_files(directory)
        hint = f", which has GGUF files: name one of them, such as {gguf_files[0]}" if gguf_files else ""
        raise ConfigError(f"model.path: expected {_EXPECTED}, got {directory}{hint}")
    return ModelLocation(directory.resolve().name, directory)


def _locate_in_snapshot(name: HubName, snapshot: Path) -> ModelLocation:
    if (snapshot / "config.json").is_file():
        return ModelLocation(name.repository, snapshot, name)
    gguf_files = _gguf_files(snapshot)
    if len(gguf_files) == 1:
        return ModelLocation(name.repository, gguf_files[0], name)
    if gguf_files:
        raise ConfigError(
            f"model.path: {name.repository} has {len(gguf_files)} GGUF files: name one of them, such as {gguf_files[0]}"
        )
    raise ConfigError(
        f"model.path: {name.repository} has neither a config.json nor a GGUF file in {snapshot}: to download it, "
        f"{name.download_command}"
    )


def _gguf_files(directory: Path) -> list[Path]:
    return sorted(each for each in directory.glob(f"*{_SUFFIX}") if each.is_file())
