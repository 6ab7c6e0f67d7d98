"""Directories that `radixkv convert` writes."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("gguf")

from radixkv.errors import ConfigError
from radixkv.model.conversion import convert
from radixkv.service.cli.main import main
from radixkv.service.text.tokenizer import Tokenizer
from tests.model_files.gguf_models import random_model, write_gguf
from tests.model_files.test_model_location import write_snapshot


@pytest.fixture(autouse=True)
def caches(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))


@pytest.mark.parametrize("kind", ["llama3", "gemma3"])
def test_transformers_loads_a_converted_gguf_file(tmp_path, kind, capsys):
    model = random_model(kind)
    source = write_gguf(tmp_path / "model.gguf", model, kind)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path}/out with 0.00 GB of weights")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, attn_implementation="eager")
    assert loaded.dtype == torch.float32
    assert getattr(loaded.config, "quantization_config", None) is None
    tokens = torch.arange(3, 60)[None]
    with torch.inference_mode():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert theirs.encode("Hello, world") == Tokenizer.load(source).encode("Hello, world")
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("float16", torch.float16)])
def test_weights_have_the_requested_dtype(tmp_path, dtype, expected):
    source = write_gguf(tmp_path / "model.gguf", random_model("qwen2"), "qwen2", "Q8_0")
    num_bytes = convert(str(source), str(tmp_path / "out"), dtype)
    assert num_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, dtype="auto")
    assert loaded.dtype == expected


def test_a_model_of_the_hub_is_copied_without_links(tmp_path):
    files = {"config.json": b"{}", "model.safetensors": b"12", "tokenizer.json": b"{}", "pytorch_model.bin": b"x"}
    snapshot = write_snapshot(Path(os.environ["HF_HUB_CACHE"]), "org/model", files)
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates" / "rag.jinja").write_text("x")
    assert convert("org/model", str(tmp_path / "out")) == 2
    written = {each.relative_to(tmp_path / "out").as_posix(): each for each in (tmp_path / "out").rglob("*")}
    assert sorted(written) == [
        "additional_chat_templates",
        "additional_chat_templates/rag.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert not any(each.is_symlink() for each in written.values())
    with pytest.raises(ConfigError, match="--dtype: requires a GGUF file, got org/model"):
        convert("org/model", str(tmp_path / "other"), "float16")


def test_nothing_is_overwritten_and_nothing_is_left_after_an_error(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main(["convert", "org/model", str(tmp_path / "out")]) == 2
    assert "expected a directory that does not exist, got " in capsys.readouterr().err
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert main(["convert", str(tmp_path / "bad.gguf"), str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.startswith("radixkv: convert: expected a GGUF file of a language model, got ")
    source = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", llama__feed_forward_length=128)
    assert main(["convert", str(source), str(tmp_path / "new")]) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bad.gguf", "model.gguf", "out"]


def test_a_converted_file_keeps_its_end_tokens(tmp_path):
    source = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama")
    convert(str(source), str(tmp_path / "out"))
    generation_config = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation_config["eos_token_id"] == [511, 509]
