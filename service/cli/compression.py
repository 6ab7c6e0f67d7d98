"""Arguments that say what K/V a generation keeps."""

from __future__ import annotations

import argparse

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.errors import ConfigError, InvalidRequest
from radixkv.service.cli import argument_types

_NUMBERS = ("tokens", "sinks", "window")


def add_compression(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a compression to a parser."""
    group = parser.add_argument_group("lossy compression of the K/V", "Changes the answer; nothing of it is cached.")
    group.add_argument(
        "--compression",
        metavar="POLICY",
        choices=[policy.value for policy in CompressionPolicy],
        help=f"keep only a part of the K/V after prefill: {', '.join(CompressionPolicy)} (default: keep all)",
    )
    group.add_argument(
        "--compression-tokens",
        metavar="N",
        type=argument_types.positive,
        help="K/V entries that each head keeps; required by --compression (default: none)",
    )
    group.add_argument(
        "--compression-sinks",
        metavar="N",
        type=argument_types.count,
        help="first tokens that streaming_llm keeps (default: 4)",
    )
    group.add_argument(
        "--compression-window",
        metavar="N",
        type=argument_types.positive,
        help="last tokens that h2o and snapkv always keep (default: half of --compression-tokens, at most 32 for "
        "snapkv)",
    )


def compression_of(arguments: argparse.Namespace) -> Compression | None:
    """Return the compression that is asked for; None for none.

    Raises:
        ConfigError: an argument is missing or out of range, or makes no sense without another one.
    """
    given = {name: getattr(arguments, f"compression_{name}") for name in _NUMBERS}
    if arguments.compression is None:
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"--compression-{name}: expected --compression with it, got none")
        return None
    if given["tokens"] is None:
        raise ConfigError("--compression: expected --compression-tokens with it, got none")
    compression = Compression(
        CompressionPolicy(arguments.compression), given["tokens"], given["sinks"], given["window"]
    )
    try:
        compression.validate()
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error
    return compression
