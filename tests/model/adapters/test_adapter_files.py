from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.phimoe.modeling_phimoe import PhimoeForCausalLM, PhimoeTopKRouter

from radixkv.config import ModelConfig
from radixkv.errors import InvalidAdapter
from radixkv.model.adapters.adapter_files import AdapterFiles, adaptable_layers, read_adapter
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from tests.model.adapters.made_by_peft import write_adapter
from tests.model.coverage.small_configs import small_config
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.model.exact.exact_cases import MODELS

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(CONFIGS["llama"], tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return load_model(ModelConfig(path=str(checkpoint), device="cpu", exactness="fast"))


@pytest.fixture(scope="module")
def written(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(checkpoint, tmp_path_factory.mktemp("adapter"))


def copy_adapter(written: Path, directory: Path, tensors: dict[str, Any] | None = None, **fields: Any) -> Path:
    """Copy an adapter with some tensors and fields replaced; None removes a tensor."""
    directory.mkdir(exist_ok=True)
    all_tensors = {**load_file(written / "adapter_model.safetensors"), **(tensors or {})}
    kept_tensors = {name: tensor for name, tensor in all_tensors.items() if tensor is not None}
    save_file(kept_tensors, directory / "adapter_model.safetensors")
    config = {**json.loads((written / "adapter_config.json").read_text()), **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def ids(*token_ids: int) -> bytes:
    return np.array(token_ids, dtype="<u4").tobytes()


def test_all_linear_layers_but_the_head_are_read(written: Path, model: Model) -> None:
    files = read_adapter(written, model)
    assert len(files.layers) == 3 * 7  # layers, and linear layers in each
    assert files.rank == 4
    assert files.num_bytes == sum(each.nbytes for each in load_file(written / "adapter_model.safetensors").values())
    assert files.invocation_token_ids is None


def test_the_scale_is_multiplied_into_lora_b(written: Path, model: Model) -> None:
    tensors = load_file(written / "adapter_model.safetensors")
    layer = read_adapter(written, model).layers["model.layers.0.self_attn.q_proj"]
    assert torch.equal(layer.down, tensors[f"{LAYER}.lora_A.weight"])
    scale = 8 / 4  # lora_alpha divided by the rank
    assert torch.equal(layer.up, scale * tensors[f"{LAYER}.lora_B.weight"])


def test_adapters_with_equal_outputs_have_equal_digests(written: Path, model: Model, tmp_path: Path) -> None:
    digest = read_adapter(written, model).digest
    assert len(digest) == 40
    same = copy_adapter(written, tmp_path / "same", base_model_name_or_path="elsewhere", lora_dropout=0.1)
    assert read_adapter(same, model).digest == digest


def test_everything_that_changes_outputs_changes_the_digest(written: Path, model: Model, tmp_path: Path) -> None:
    name = f"{LAYER}.lora_A.weight"
    tensor = load_file(written / "adapter_model.safetensors")[name]
    flipped = tensor.clone()
    flipped.view(torch.int32)[0, 0] ^= 1  # the last bit of one number
    changed = [
        copy_adapter(written, tmp_path / "bit", {name: flipped}),
        copy_adapter(written, tmp_path / "dtype", {name: tensor.bfloat16()}),
        copy_adapter(written, tmp_path / "alpha", lora_alpha=7),
        copy_adapter(written, tmp_path / "rslora", use_rslora=True),
        copy_adapter(written, tmp_path / "pattern", alpha_pattern={"q_proj": 1}),
        copy_adapter(written, tmp_path / "invoked", alora_invocation_tokens=[1, 2]),
        copy_adapter(written, tmp_path / "fewer", {name: None, name.replace("lora_A", "lora_B"): None}),
    ]
    digests = [read_adapter(each, model).digest for each in (written, *changed)]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{LAYER}.lora_A.weight": torch.zeros(4, 63)}, r"\.lora_A: expected shape \(4, 64\), got \(4, 63\)"),
        ({f"{LAYER}.lora_B.weight": torch.zeros(64, 5)}, r"\.lora_B: expected shape \(64, 4\), got \(64, 5\)"),
        ({f"{LAYER}.lora_B.weight": None}, ": expected lora_A and lora_B, got lora_A only"),
        ({f"{LAYER}.lora_A.weight": torch.zeros(4, 64, dtype=torch.int8)}, r"\.lora_A: expected floating-point"),
        (
            {f"{LAYER}.lora_A.weight": torch.full((4, 64), torch.inf)},
            ": contains values that are not finite in float",
        ),
    ],
)
def test_a_layer_that_does_not_fit_is_refused_by_name(
    written: Path, model: Model, tmp_path: Path, tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        InvalidAdapter, match=rf"^adapter_model\.safetensors model\.layers\.0\.self_attn\.q_proj{message}"
    ):
        read_adapter(copy_adapter(written, tmp_path, tensors), model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.lm_head", "lm_head: expected a linear layer of attention or of an MLP, got "),
        (
            "base_model.model.model.layers.3.mlp.up_proj",
            r"model\.layers\.3\.mlp\.up_proj: expected a layer of the model, got none of that name",
        ),
        (
            "base_model.model.model.norm",
            r"model\.norm: expected a linear layer of attention or of an MLP, got LlamaRMSNorm",
        ),
    ],
)
def test_other_layers_are_refused_by_name(written: Path, model: Model, tmp_path: Path, name: str, message: str) -> None:
    tensors = {f"{name}.lora_A.weight": torch.zeros(4, 64), f"{name}.lora_B.weight": torch.zeros(64, 4)}
    with pytest.raises(InvalidAdapter, match=rf"^adapter_model\.safetensors {message}"):
        read_adapter(copy_adapter(written, tmp_path, tensors), model)


@pytest.mark.parametrize("name", [f"{LAYER}.lora_magnitude_vector", "base_model.model.model.embed_tokens.weight", "x"])
def test_tensors_of_other_methods_are_refused_by_name(written: Path, model: Model, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidAdapter, match=rf"^adapter_model\.safetensors {name}: expected base_model\.model\.LAYER"):
        read_adapter(copy_adapter(written, tmp_path, {name: torch.zeros(4)}), model)


def test_files_that_cannot_be_read_are_refused(written: Path, model: Model, tmp_path: Path) -> None:
    file = copy_adapter(written, tmp_path) / "adapter_model.safetensors"
    with pytest.raises(InvalidAdapter, match=r"^adapter_model\.safetensors: expected at most 100 bytes"):
        read_adapter(tmp_path, model, max_bytes=100)
    for data in (b"", file.read_bytes()[:-1], b"\xff" * 100):
        file.write_bytes(data)
        with pytest.raises(InvalidAdapter, match=r"^adapter_model\.safetensors: expected safetensors"):
            read_adapter(tmp_path, model)
    save_file({}, file)
    with pytest.raises(InvalidAdapter, match=r"^adapter_model\.safetensors: expected tensors of at least one layer"):
        read_adapter(tmp_path, model)
    file.unlink()
    with pytest.raises(InvalidAdapter, match=r"^adapter_model\.safetensors: expected a file"):
        read_adapter(tmp_path, model)


def test_an_activated_adapter_applies_from_the_last_invocation_on() -> None:
    files = AdapterFiles("", 8, 0, (7, 8), {})
    assert files.applies_from(ids(7, 8, 1, 7, 8, 2)) == 3
    assert files.applies_from(ids(7, 8)) == 0
    assert files.applies_from(ids(1, 7)) is None
    assert files.applies_from(b"") is None
    assert AdapterFiles("", 8, 0, (7, 7), {}).applies_from(ids(7, 7, 7)) == 1
    assert AdapterFiles("", 8, 0, None, {}).applies_from(ids(1)) == 0


def test_an_invocation_must_start_at_a_token_boundary() -> None:
    assert AdapterFiles("", 8, 0, (0x00020001,), {}).applies_from(ids(0x00010000, 0x00000002)) is None
    assert AdapterFiles("", 8, 0, (0,), {}).applies_from(ids(5, 0, 0x01000000, 0x100)) == 1


def test_a_router_of_a_class_derived_from_linear_layers_can_not_be_adapted() -> None:
    module = PhimoeForCausalLM(small_config("phimoe"))
    routers = {name for name, part in module.named_modules() if isinstance(part, PhimoeTopKRouter)}
    assert routers
    assert not routers & adaptable_layers(module).keys()


def test_an_absorbed_layer_of_latent_attention_is_rejected_by_name(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(MODELS["deepseek_v3"], tmp_path / "base")
    model = load_model(ModelConfig(path=str(checkpoint), device="cpu", exactness="fast"))
    served = write_adapter(checkpoint, tmp_path / "served", target_modules=["q_a_proj", "kv_a_proj_with_mqa", "o_proj"])
    assert len(read_adapter(served, model).layers) == 3 * 3
    refused = write_adapter(checkpoint, tmp_path / "refused", target_modules=["q_b_proj", "kv_b_proj"])
    with pytest.raises(
        InvalidAdapter,
        match=r"layers\.0\.self_attn\.kv_b_proj: expected a layer that can be adapted, got kv_b_proj of",
    ):
        read_adapter(refused, model)
