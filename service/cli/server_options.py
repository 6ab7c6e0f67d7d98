"""Options that `radixkv serve` and `radixkv fleet` share, and options as settings of the configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping

from radixkv.config import ModelConfig, ServerConfig
from radixkv.service.cli.options import Option

MODEL = Option(
    "--model",
    "tiny|DIR|FILE.gguf|ORG/NAME",
    None,
    "the embedded model, a directory with a config.json and safetensors, a GGUF file, or a model of the Hugging Face "
    f"Hub that is in the local cache (default: {ModelConfig().path})",
)
LISTEN = (
    Option("--host", None, None, f"address to listen on (default: {ServerConfig().host})"),
    Option("--port", None, int, f"port to listen on; 0 picks a free one (default: {ServerConfig().port})"),
)
CONFIG = (
    Option("--config", "FILE", None, "TOML file with the configuration (default: none)"),
    Option(
        "--set",
        "a.b=v",
        None,
        "set one key of the configuration; may be repeated; overrides --config, and the options above override it "
        "(default: none)",
        [],
        {"action": "append"},
    ),
)


def settings_of(values: Mapping[str, object]) -> list[str]:
    """Return keys of the configuration and their values in the form of `--set`; values of None are left out."""
    # A JSON string is a TOML string.
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items() if value is not None]
