"""Runs `radixkv serve` with its HTTP port in a forked process, and makes the official clients for it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import torch

from radixkv.model.tiny_files import write_tiny_files
from radixkv.model.tiny_model import build_tiny_model
from tests.free_port import free_port
from tests.patience import PATIENCE_S
from tests.whole.forked_server import serving


@contextmanager
def serving_http(*arguments: str) -> Iterator[tuple[str, str]]:
    """Run `radixkv serve` with these arguments; yield its URL over HTTP and its address over gRPC."""
    port = free_port()
    with serving("--http-port", str(port), *arguments) as (_, address):
        yield f"http://127.0.0.1:{port}", address


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


def anthropic_client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S)


def post(url: str, body: object) -> tuple[int, Any]:
    """Send bytes, or another value as JSON; return the status and the JSON of the response."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(url, encoded, timeout=PATIENCE_S) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def write_model(directory: Path, template: str, tags: Sequence[str] = ()) -> None:
    """Write the embedded model with a chat template, and with `tags` as further special tokens."""
    torch.manual_seed(0)  # for the embeddings of the further tokens
    model = build_tiny_model("eager")
    old_size = model.config.vocab_size
    new_size = old_size + len(tags)
    model.resize_token_embeddings(new_size)
    model.save_pretrained(directory)
    write_tiny_files(directory)
    config_file = directory / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "vocab_size": new_size}))
    settings_file = directory / "tokenizer_config.json"
    settings_file.write_text(json.dumps({**json.loads(settings_file.read_text()), "chat_template": template}))

    tokenizer_file = directory / "tokenizer.json"
    tokenizer = json.loads(tokenizer_file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for index, tag in enumerate(tags):
        tokenizer["added_tokens"].append({"id": old_size + index, "content": tag, "special": True, **flags})
    tokenizer_file.write_text(json.dumps(tokenizer))
