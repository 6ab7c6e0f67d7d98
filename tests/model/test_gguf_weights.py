"""A GGUF file of any supported architecture gives the results of the model from which it was made."""

import gc
import json
import logging

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("gguf")

import gguf

from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.kernels.cpu.int8_linear import adds_integers_exactly
from radixkv.kernels.quantized_weight import QuantizedWeight
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.gguf_weights import _from_q4_k, load_gguf_weights
from radixkv.model.layers.quantized_embedding import QuantizedEmbedding
from radixkv.model.layers.stored_weight import stored_weight
from radixkv.model.loading import load_model
from radixkv.model_files.gguf_config import ARCHITECTURES
from radixkv.model_files.gguf_file import GgufFile
from radixkv.storage.device_pool import KVStorage
from tests.model.test_model import assert_agree, blocks, chunk
from tests.model_files.gguf_models import KINDS, VOCAB_SIZE, random_model, write_gguf
from tests.processor import skip_without_kernels_for

# transformers reads the other kinds without their biases, head dims, RoPE scaling, windows or softcaps.
READ_BY_TRANSFORMERS = ("llama", "mistral", "qwen2")


def test_every_architecture_has_a_case():
    assert {architecture for architecture, *_ in KINDS.values()} == set(ARCHITECTURES)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_served_as_the_model_it_was_made_from(tmp_path, kind):
    """Cold logits agree with the model's, and a hit, even one that ends inside a block, changes no bit."""
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
    for num_cached in (16, 50, 99):
        runner.run([chunk(tokens, 0, num_cached, table[7:14])])
        other_request = chunk(tokens[:37], 0, 37, table[14:17])
        warm = runner.run([other_request, chunk(tokens, num_cached, 100, table[7:14])]).logits[1]
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


def linear_and_embedding_layers(module):
    kinds = torch.nn.Linear | torch.nn.Embedding
    return {name: part for name, part in module.named_modules() if isinstance(part, kinds)}


@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "phi3"])
def test_layers_keep_the_codes_of_a_file(tmp_path, kind, tensor_type):
    model = random_model(kind)
    path = write_gguf(tmp_path / "model.gguf", model, kind, tensor_type)
    inputs = GgufFile.read(path), type(model), model.config, torch.float32, "eager"
    dequantized = linear_and_embedding_layers(load_gguf_weights(*inputs))
    for name, layer in linear_and_embedding_layers(load_gguf_weights(*inputs, keeps_quantized=True)).items():
        stored, weight = stored_weight(layer), dequantized[name].weight
        if tensor_type == "F32":
            assert stored is None
            continue
        assert stored is not None, name
        assert stored.bits == (4 if tensor_type in ("Q4_0", "Q4_1") else 8)
        error = (stored.dequantize() - weight).norm() / weight.norm()
        assert error <= (1e-2 if tensor_type == "Q5_0" else 0), name
        assert layer.weight.untyped_storage().nbytes() == layer.weight.element_size(), (
            "the weight is not stored a second time"
        )
    assert not any(map(stored_weight, dequantized.values()))


@pytest.mark.parametrize("kind", ["llama", "llama-tied-with-biases", "gemma3"])
def test_embeddings_stay_quantized_and_have_the_bits_of_dequantized_ones(tmp_path, kind):
    skip_without_kernels_for("q4")
    path = write_gguf(tmp_path / "model.gguf", random_model(kind), kind, "Q4_1")
    embeddings = load_model(ModelConfig(path=str(path), device="cpu")).module.get_input_embeddings()
    plain = load_model(ModelConfig(path=str(path), device="cpu", weights="q8")).module.get_input_embeddings()
    assert isinstance(embeddings, QuantizedEmbedding)
    assert not isinstance(plain, QuantizedEmbedding)
    ids = torch.tensor([[0, 511, 7, 31, 32, 33, 7]])
    with torch.inference_mode():
        assert torch.equal(embeddings(ids), plain(ids))


def test_a_loaded_model_holds_its_weights_only_in_the_form_that_it_multiplies(tmp_path):
    skip_without_kernels_for("q4")
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", "Q4_1")
    weights_before = quantized_weights_in_memory()
    model = load_model(ModelConfig(path=str(path), device="cpu"))
    assert isinstance(model.module.get_input_embeddings(), QuantizedEmbedding)
    gc.collect()
    is_new = [all(weight is not other for other in weights_before) for weight in quantized_weights_in_memory()]
    assert not any(is_new)


def quantized_weights_in_memory():
    return [each for each in gc.get_objects() if type(each) is QuantizedWeight]


def test_projections_of_different_types_are_merged_in_8_bits(tmp_path, caplog):
    """Files of the kind Q4_K_M mix types. C++ computes a layer in one call only if its projections are merged."""
    skip_without_kernels_for("q4")
    model = random_model("llama")
    mixed = {".attn_v.": "Q5_0", ".ffn_up.": "Q8_0"}
    path = write_gguf(tmp_path / "model.gguf", model, "llama", "Q4_0", mixed=mixed)
    with caplog.at_level(logging.INFO):
        served = load_model(ModelConfig(path=str(path), device="cpu", dtype="float32"))
    assert (
        "matmuls by library: q4 7, q8 6" in caplog.text
    )  # 3 layers: o and down in q4, qkv and gate with up in q8; and the head
    runner = Runner(served, KVStorage(16, 16, served.kv_shape, served.device), TorchKernels())
    tokens = np.random.default_rng(1).integers(0, VOCAB_SIZE, 60).astype("<u4")
    dequantized = load_gguf_weights(GgufFile.read(path), type(model), model.config, torch.float32, "eager")
    with torch.inference_mode():
        for name, weight in dequantized.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight")):
                weight.copy_(QuantizedWeight.quantize(weight, 8).dequantize())
        expected = dequantized(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    assert_agree(runner.run([chunk(tokens, 0, 60, np.arange(4, dtype=np.int32))]).logits[0], expected[-1])


def test_blocks_of_256_keep_their_codes():
    """The package `gguf` can read blocks of type Q4_K, but not write them, so these are random bytes."""
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 256, (6, 2, 144), dtype=np.uint8)
    rows[..., :4] = generator.uniform(1e-4, 1e-2, (6, 2, 2)).astype(np.float16).view(np.uint8)
    expected = torch.from_numpy(gguf.dequantize(rows.reshape(6, -1), gguf.GGMLQuantizationType.Q4_K))
    weight = _from_q4_k(torch.from_numpy(rows), torch.float32)
    assert (weight.shape, weight.scales.shape) == ((6, 512), (6, 16))
    largest = 15 * weight.scales.abs() + weight.minima.abs()
    bound = 2**-11 * largest.repeat_interleave(32, 1)  # scales and minima were rounded
    assert ((weight.dequantize() - expected).abs() <= bound).all()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("tensor_type", "backend"), [("Q8_0", "q8"), ("Q4_1", "q4"), ("Q5_0", "q8"), ("F16", None)])
@pytest.mark.parametrize("weights", ["auto", "q8", "q4"])
def test_a_model_computes_with_the_codes_of_its_file(tmp_path, caplog, weights, tensor_type, backend):
    skip_without_kernels_for("q4")
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", tensor_type)
    with caplog.at_level(logging.INFO):
        model = load_model(ModelConfig(path=str(path), device="cpu", weights=weights))
    (line,) = (each for each in caplog.messages if each.startswith("matmuls by library: "))
    backends = {part.split()[0] for part in line.removeprefix("matmuls by library: ").split(", ")}
    expected = {"auto": {backend}, "q8": {"q8"}, "q4": {"q4", "q8"}}[weights]  # with q4, the head is in q8
    assert backends == expected or (backend is None and weights == "auto")
    other_than_auto = "int8" if adds_integers_exactly() else "q4" if backend == "q8" else "q8"
    other_weights = other_than_auto if weights == "auto" else "auto"
    other_model = load_model(ModelConfig(path=str(path), device="cpu", weights=other_weights))
    assert other_model.fingerprint != model.fingerprint


def test_quantized_weights_take_bfloat16_and_the_log_says_so(tmp_path, caplog):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", "Q4_0")
    with caplog.at_level(logging.INFO):
        model = load_model(ModelConfig(path=str(path), device="cpu"))
    assert model.module.dtype == torch.bfloat16
    assert "MB in Q4_0" in caplog.text
    assert "others are dequantized to bfloat16" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 4},
            "expected the tensors of a llama model, got a file without 9 of them, such as blk",
        ),
        ({"num_hidden_layers": 2}, "got a file with 9 others, such as blk.2"),
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
    with pytest.raises(ConfigError, match=r"expected blk\.0\..*weight of the shape \(.*128.*\), got \(.*192.*\)$"):
        load_model(ModelConfig(path=str(path), device="cpu"))


def test_files_next_to_a_gguf_file_do_not_count(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
    path = write_gguf(tmp_path / "model.gguf", random_model("qwen2"), "qwen2")
    assert load_model(ModelConfig(path=str(path), device="cpu")).module.config.model_type == "qwen2"
