"""Steps that are captured as CUDA graphs, on a GPU; `tests/compute/graphs/test_graphs.py` needs none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, PretrainedConfig

from radixkv.compute.forward import Chunk
from radixkv.compute.graphs.capturer import GraphCapturer
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig, ModelConfig
from radixkv.model.loading import load_model
from radixkv.startup.attention_choice import choose_attention_kernels
from radixkv.startup.attention_trial import try_attention_here
from radixkv.startup.graph_check import drop_wrong_graphs
from radixkv.storage.device_pool import KVStorage
from tests.model.exact.checkpoints import SHAPE, VOCAB_SIZE, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no CUDA graphs without a GPU"),
]

BLOCK_SIZE = 64
MAX_TOKENS = 6144
# The attention kernels use warp specialization for this head_dim.
SIZES = {**SHAPE, "head_dim": 64, "max_position_embeddings": MAX_TOKENS}
LLAMA, GEMMA = LlamaConfig(**SIZES), Gemma2Config(**SIZES, sliding_window=300, query_pre_attn_scalar=64)


@pytest.mark.parametrize(
    ("config", "dtype", "kv_dtype", "exactness"),
    [
        (LLAMA, "bfloat16", "auto", "fast"),
        (LLAMA, "bfloat16", "auto", "exact"),
        (GEMMA, "bfloat16", "int8", "fast"),
        (GEMMA, "float32", "auto", "exact"),
    ],
    ids=str,
)
def test_graphs_are_correct_and_agree_with_launches(
    config: PretrainedConfig,
    dtype: str,
    kv_dtype: str,
    exactness: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = write_checkpoint(config, tmp_path)
    model = load_model(ModelConfig(str(directory), device="cuda", dtype=dtype, exactness=exactness))
    kv_shape = model.kv_shape.stored_as(kv_dtype)
    kernels = choose_attention_kernels(model, kv_shape, BLOCK_SIZE, try_attention_here)
    storage = KVStorage(400, BLOCK_SIZE, kv_shape, model.device)
    capturer = GraphCapturer(model, kernels, EngineConfig(max_step_tokens=64, max_running_requests=8))
    graphs = capturer.capture(storage, MAX_TOKENS)
    assert graphs is not None, caplog.text
    shapes = graphs.shapes
    drop_wrong_graphs(graphs, model, storage, kernels, MAX_TOKENS)
    assert graphs.shapes == shapes, caplog.text
    with ThreadPoolExecutor(1) as engine_thread:  # another thread than the one that captured
        engine_thread.submit(compare, Runner(model, storage, kernels, graphs), exactness).result()


def compare(captured: Runner, exactness: str) -> None:
    """Compare captured and launched steps of up to four requests, some after long prefixes."""
    random, pool, launched = np.random.default_rng(0), captured.storage.pool, captured.without_graphs()
    prompts = [random.integers(0, VOCAB_SIZE, MAX_TOKENS).astype("<u4").tobytes() for _ in range(4)]
    tables = random.permutation(400).astype(np.int32)[:384].reshape(4, 96)
    ends = np.array([5000, 300, 2047, 1])
    for prompt, table, end in zip(prompts, tables, ends, strict=True):
        launched.run([Chunk(prompt, 0, int(end), table, None, wants_logits=False)])
    for _ in range(20):
        num_new_tokens = random.integers(1, 16, 4) if random.random() < 0.5 else np.ones(4, dtype=np.int64)
        chunks = [
            Chunk(prompt, int(end), int(end + num_new), table, None, wants_logits=True)
            for prompt, table, end, num_new in zip(prompts, tables, ends, num_new_tokens, strict=True)
        ][: random.integers(1, 5)]
        got = captured.run(chunks)
        got_logits, got_blocks = got.logits.clone(), pool.blocks.clone()
        expected = launched.run(chunks)
        if exactness == "exact":
            assert torch.equal(got_logits, expected.logits)
            assert torch.equal(got_blocks, pool.blocks)
        assert (got_logits - expected.logits).norm() <= 0.05 * expected.logits.norm()
        assert got.is_finite == expected.is_finite == [True] * len(chunks)
