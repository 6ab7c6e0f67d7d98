"""GGUF files of every supported architecture are served as transformers computes the models they were made from."""

import json
import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("gguf")

from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.gguf_weights import load_gguf_weights
from radixkv.model.loading import load_model
from radixkv.model_files.gguf_config import ARCHITECTURES
from radixkv.model_files.gguf_file import GgufFile
from radixkv.storage.device_pool import KVStorage
from tests.model.test_model import assert_agree, blocks, chunk
from tests.model_files.gguf_models import KINDS, VOCAB_SIZE, random_model, write_gguf

# transformers reads the others as other models: without biases, sizes of heads, RoPE scaling, windows or soft caps.
READ_BY_TRANSFORMERS = ("llama", "mistral", "qwen2")


def test_every_architecture_has_a_case():
    assert {architecture for architecture, *_ in KINDS.values()} == set(ARCHITECTURES)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_served_as_the_model_it_was_made_from(tmp_path, kind):
    """Cold, warm and with a hit inside a block; and hits change no bit."""
    oracle = random_model(kind)
    path = write_gguf(tmp_path / "model.gguf", oracle, kind)
    model = load_model(ModelConfig(path=str(path), device="cpu"))
    assert (model.name, model.module.dtype, model.is_exact) == ("model", torch.float32, True)
    assert model.eos_token_ids == {509, 511}
    assert model.limit.stated_tokens == 512
    storage = KVStorage(64, 16, model.kv_shape, model.device)
    runner = Runner(model, storage, TorchKernels())
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 100).astype("<u4")
    table = blocks(20)
    with torch.inference_mode():
        expected = oracle(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    cold = runner.run([chunk(tokens, 0, 100, table[:7])]).logits[0].clone()
    assert_agree(cold, expected[-1])
    for cached in (16, 50, 99):
        runner.run([chunk(tokens, 0, cached, table[7:14])])
        others = [chunk(tokens[:37], 0, 37, table[14:17]), chunk(tokens, cached, 100, table[7:14])]
        warm = runner.run(others).logits[1]
        assert torch.equal(warm, cold)


@pytest.mark.parametrize("tensor_type", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "phi3"])
def test_weights_are_those_of_transformers(tmp_path, kind, tensor_type):
    model = random_model(kind)
    path = write_gguf(tmp_path / "model.gguf", model, kind, tensor_type, general__name="model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    ours = load_gguf_weights(GgufFile.read(path), type(model), model.config, torch.float32, "eager")
    expected = theirs.state_dict()
    assert set(ours.state_dict()) == set(expected)
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("kind", READ_BY_TRANSFORMERS)
def test_logits_are_those_of_transformers_from_the_same_quantized_file(tmp_path, kind):
    path = write_gguf(tmp_path / "model.gguf", random_model(kind), kind, "Q8_0", general__name="model")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    model = load_model(ModelConfig(path=str(path), device="cpu", dtype="float32"))
    runner = Runner(model, KVStorage(16, 16, model.kv_shape, model.device), TorchKernels())
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 60).astype("<u4")
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    assert_agree(runner.run([chunk(tokens, 0, 60, np.arange(4, dtype=np.int32))]).logits[0], expected[-1])


def test_quantized_weights_take_bfloat16_and_the_log_says_so(tmp_path, caplog):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", "Q4_0")
    with caplog.at_level(logging.INFO):
        model = load_model(ModelConfig(path=str(path), device="cpu"))
    assert model.module.dtype == torch.bfloat16
    assert "MB in Q4_0" in caplog.text
    assert "MB in bfloat16, since quantized ones are dequantized" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 4},
            "expected the tensors of a llama model, got a file that lacks 9 of them, such as blk",
        ),
        ({"num_hidden_layers": 2}, "got a file that also has 9 of them, such as blk.2"),
    ],
)
def test_a_file_with_other_tensors_is_refused(tmp_path, change, message):
    model = random_model("llama")
    path = write_gguf(tmp_path / "model.gguf", model, "llama")
    config = type(model.config)(**{**model.config.to_dict(), **change})
    with pytest.raises(ConfigError, match=message):
        load_gguf_weights(GgufFile.read(path), type(model), config, torch.float32, ATTENTION_NAME)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", llama__feed_forward_length=128)
    with pytest.raises(ConfigError, match=r"(can't be loaded|do not fit the metadata): "):
        load_model(ModelConfig(path=str(path), device="cpu"))


def test_files_next_to_a_gguf_file_do_not_count(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
    path = write_gguf(tmp_path / "model.gguf", random_model("qwen2"), "qwen2")
    assert load_model(ModelConfig(path=str(path), device="cpu")).module.config.model_type == "qwen2"
