"""README's list of served models, each as a small random checkpoint beside transformers' eager attention."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    PretrainedConfig,
)

from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.startup.model_check import check_model
from radixkv.storage.device_pool import KVStorage
from tests.model.exact.checkpoints import CONFIGS, SHAPE, VOCAB_SIZE, load_eager, write_checkpoint

BLOCK_SIZE = 16
SERVED: dict[str, PretrainedConfig] = {
    "Llama": CONFIGS["llama"],
    "Mistral": CONFIGS["mistral"],
    "Mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "Qwen2": CONFIGS["qwen2"],
    "Qwen3": CONFIGS["qwen3"],
    "Gemma2": CONFIGS["gemma2"],
    "Gemma3": Gemma3TextConfig(**SHAPE, head_dim=16, sliding_window=24, query_pre_attn_scalar=16),
    "Phi3": CONFIGS["phi3"],
    "OLMo2": Olmo2Config(**SHAPE, pad_token_id=0, eos_token_id=1),
    "Granite": GraniteConfig(**SHAPE),
    "GPT-NeoX": GPTNeoXConfig(**SHAPE),
    "GPT-2": GPT2Config(vocab_size=VOCAB_SIZE, n_embd=64, n_layer=3, n_head=4, n_positions=512, initializer_range=0.2),
    "OPT": OPTConfig(**SHAPE, ffn_dim=96, word_embed_proj_dim=32, init_std=0.2),
}


def test_the_readme_lists_the_models_that_are_tested_here() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    listed = re.search(r"attention interface \(([^)]*) and others\)", readme)
    assert listed is not None, "expected a list in parentheses that ends with `and others`"
    assert re.split(r",\s+", listed[1]) == list(SERVED)


@pytest.mark.parametrize("exactness", ["exact", "fast"])
@pytest.mark.parametrize("name", SERVED)
def test_a_listed_model_agrees_with_eager_attention(name: str, exactness: str, tmp_path: Path) -> None:
    directory = write_checkpoint(SERVED[name], tmp_path, max_shard_size="10MB")
    model = load_model(ModelConfig(path=str(directory), device="cpu", exactness=exactness))
    check_model(model, TorchKernels(), BLOCK_SIZE)
    runner = Runner(model, KVStorage(8, BLOCK_SIZE, model.kv_shape, model.device), TorchKernels())
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 100).astype("<u4")
    with torch.inference_mode():
        expected = load_eager(directory)(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]
    for start, end in ((0, 37), (37, 99), (99, 100)):
        table = np.arange(8, dtype=np.int32)[::-1][: -(-end // BLOCK_SIZE)].copy()
        result = runner.run([Chunk(tokens.tobytes(), start, end, table, None, wants_logits=True)])
        assert result.is_finite == [True]
        torch.testing.assert_close(result.logits[0], expected[end - 1], rtol=1e-3, atol=1e-4)
    assert expected.std() > 0.01, "the oracle's logits are too flat to tell right from wrong"
