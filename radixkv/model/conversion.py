"""Writes a model directory from a GGUF file, or from another directory, such as one in the cache of Hugging Face."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from radixkv.config.atomic_directory import atomic_directory
from radixkv.config.model_directory import read_object
from radixkv.errors import ConfigError
from radixkv.model_files.gguf_file import GgufFile
from radixkv.model_files.model_location import ModelLocation, check_servable, locate

# Suffixes of the files that are copied. Weights in other formats, code and images are not copied.
_COPIED_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken")
_TEMPLATES_FOLDER = "additional_chat_templates"


def convert(source: str, directory: str, dtype: str = "auto") -> int:
    """Write a directory with config.json, safetensors, the tokenizer and the chat template of a model.

    The directory is created atomically, when it is complete. The weights of a GGUF file are dequantized.

    Args:
        source: a GGUF file, or another model that `locate` finds.
        directory: the directory to create; it must not exist.
        dtype: data type of the weights; `auto` keeps that of a checkpoint, and is bfloat16 for quantized weights.
            Any other value requires a GGUF file.

    Returns:
        The size of the weights in bytes.

    Raises:
        ConfigError: the model can't be read, `dtype` requires a GGUF file, or the directory exists or can't be written.
    """
    if os.path.lexists(directory):
        raise ConfigError(f"convert: expected a directory that does not exist, got {directory}")
    check_servable(source)
    location = locate(source)
    if dtype != "auto" and not location.is_gguf:
        raise ConfigError(f"--dtype: requires a GGUF file, got {source}")
    try:
        with atomic_directory(Path(directory)) as target:
            if location.is_gguf:
                _convert_gguf(location, dtype, target)
            else:
                _copy_files(location.path, target)
            return sum(each.stat().st_size for each in target.glob("*.safetensors"))
    except FileExistsError as error:
        raise ConfigError(f"convert: expected a directory that does not exist, got {directory}") from error
    except OSError as error:
        raise ConfigError(f"convert: expected a directory that can be written, got {directory}: {error}") from error


def _convert_gguf(location: ModelLocation, dtype: str, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from radixkv.model.gguf_weights import load_gguf_weights

    file, metadata_directory = GgufFile.read(location.path), location.directory()
    dtype_name = file.dtype if dtype == "auto" else dtype
    config = AutoConfig.from_pretrained(metadata_directory, local_files_only=True)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    module = load_gguf_weights(file, model_class, config, getattr(torch, dtype_name), "eager")
    module.save_pretrained(directory)
    _copy_files(metadata_directory, directory)  # replaces config.json
    model_config = {**read_object(directory / "config.json"), "dtype": dtype_name}
    (directory / "config.json").write_text(json.dumps(model_config, ensure_ascii=False, indent=1), encoding="utf-8")


def _copy_files(source: Path, directory: Path) -> None:
    """Copy the files of a model. Symbolic links, as in the cache of Hugging Face, are followed."""
    for path in [*sorted(source.iterdir()), *sorted((source / _TEMPLATES_FOLDER).glob("*.jinja"))]:
        if path.is_file() and path.suffix in _COPIED_SUFFIXES:
            target = directory / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
