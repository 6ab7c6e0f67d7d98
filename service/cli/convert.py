"""`radixkv convert`: writes a model directory from a GGUF file, or from a model in the local Hugging Face cache."""

from __future__ import annotations

import argparse

from radixkv.errors import ConfigError
from radixkv.service.cli.options import Option, add_options

_DESCRIPTION = (
    "Write a directory with config.json, safetensors, the tokenizer and the chat template of a model. The weights of a "
    "GGUF file are dequantized. Nothing is downloaded, and nothing is overwritten."
)
_OPTIONS = (
    Option("source", "SOURCE", None, "a GGUF file, or ORG/NAME of a downloaded model"),
    Option("directory", "DIRECTORY", None, "directory to write; it must not exist"),
    Option(
        "--dtype",
        None,
        None,
        "dtype of the weights of a GGUF file; auto is bfloat16 if they are quantized, or else as in the file",
        "auto",
        {"choices": ("auto", "float32", "bfloat16", "float16")},
    ),
)


def add_arguments(convert: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    convert.description = _DESCRIPTION
    add_options(convert, _OPTIONS)
    convert.set_defaults(command=_convert)


def _convert(arguments: argparse.Namespace) -> None:
    from radixkv.model.conversion import convert

    try:
        num_bytes = convert(arguments.source, arguments.directory, arguments.dtype)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path: ", "convert: ", 1)) from error
    print(f"wrote {arguments.directory} with {num_bytes / 1e9:.2f} GB of weights")
