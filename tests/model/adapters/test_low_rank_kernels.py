"""The GPU kernel for adapters, compared with the matmuls for CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig

from radixkv.compute.runner import Runner
from radixkv.errors import InvalidAdapter
from radixkv.model.adapters.adapted_layers import AdaptedLayers
from radixkv.model.adapters.low_rank_kernels import LowRankKernels, PackedWeights
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage
from tests.kernels.gpu.interpreter import interpret_kernels
from tests.model.adapters.adapted import Adapted, prompt, tables
from tests.model.exact.random_adapters import random_adapter

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    ),
    "gpt2": GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2),
}  # fmt: skip


def serve(family: str, has_kernels: bool) -> Adapted:
    """Serve a model with three adapters, with the kernel for GPUs or with matmuls. As on a GPU, nothing is packed."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation=ATTENTION_NAME)
    device = torch.device("cpu")
    model = Model(family, module, device, is_exact=False, is_fused=False, max_adapters=0 if has_kernels else 4)
    if has_kernels:
        kernels = LowRankKernels(device, is_exact=True)
        model.adapted = AdaptedLayers(model.module, kernels, max_adapters=4, max_bytes=2**20)
    assert model.adapted is not None
    files = [
        random_adapter(model, "all", 3, seed=1),
        random_adapter(model, "few", 20, seed=2, share=0.4),  # of another rank
        random_adapter(model, "some", 16, seed=3, share=0.7),
    ]
    for each in files:
        model.try_adapter(each)
        model.adapted.adapters.add(each)
    storage = KVStorage(64, 16, model.kv_shape, device)
    return Adapted(model, Runner(model, storage, TorchKernels()), files, [])


def num_bytes(packed: Any) -> int:
    """Return the number of bytes of an adapter that was packed by the kernel, or for matmuls in float32."""
    if isinstance(packed, PackedWeights):
        return sum(tensor.nbytes for pair in packed.weights.values() for tensor in pair)
    return sum(
        4 * factor.in_features * factor.out_features for layer in packed.values() for factor in (layer.down, layer.up)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernel_agrees_with_the_matmuls(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_matmuls = serve(family, has_kernels=False)
    interpret_kernels(monkeypatch)
    with_kernel = serve(family, has_kernels=True)
    prompts, blocks = [prompt(length, seed=length) for length in (3, 20, 7, 2, 5)], tables(5, num_blocks=2)
    answers = []
    for served in (with_matmuls, with_kernel):
        chunks = [
            served.chunk(number, tokens, 0, len(tokens), table % 64)
            for number, tokens, table in zip((1, 0, 2, 1, 3), prompts, blocks, strict=True)
        ]
        answers.append(served.runner.run(chunks).logits)
    torch.testing.assert_close(*answers, rtol=0, atol=1e-4)
    for served in (with_matmuls, with_kernel):
        adapters = served.model.adapted.adapters
        assert sum(each.num_bytes for each in served.files) < adapters.device_bytes
        packed = [adapters._on_device[each.digest] for each in served.files]
        assert adapters.device_bytes == sum(map(num_bytes, packed))
    base = [with_kernel.chunk(0, prompts[0], 0, 3, blocks[0] % 64)]
    assert (with_kernel.runner.run(base).logits - answers[1][:3]).abs().max() > 0.1, "the adapter changes the logits"


def test_a_rank_that_the_kernel_does_not_support_is_rejected() -> None:
    model = serve("llama", has_kernels=False).model
    kernels = LowRankKernels(torch.device("cpu"), is_exact=True)
    model.adapted = AdaptedLayers(model.module, kernels, max_adapters=4, max_bytes=2**20)
    for try_or_add in (model.try_adapter, model.adapted.adapters.add):
        with pytest.raises(InvalidAdapter, match="expected a rank of at most 128 on a GPU, got 129"):
            try_or_add(random_adapter(model, "large", 129))


def test_kernels_that_are_not_batch_invariant_are_rejected_in_exact_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model = serve("llama", has_kernels=False).model
    monkeypatch.setattr("radixkv.model.adapters.low_rank_kernels.low_rank_rows_agree", lambda *_: False)
    files = random_adapter(model, "any", 4)
    for is_exact in (True, False):
        kernels = LowRankKernels(torch.device("cpu"), is_exact=is_exact)
        model.adapted = AdaptedLayers(model.module, kernels, max_adapters=4, max_bytes=2**20)
        if is_exact:
            with pytest.raises(InvalidAdapter, match="is not batch-invariant"):
                model.try_adapter(files)
        else:
            model.try_adapter(files)
