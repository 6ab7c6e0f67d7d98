"""Steps that are recorded as CUDA graphs, where there are any: `tests/test_step_graphs.py` does without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from radixkv.attention_trial import try_attention_here
from radixkv.config import EngineConfig, ModelConfig
from radixkv.engine_builder import attention_kernels
from radixkv.forward import Chunk
from radixkv.graph_check import drop_wrong_graphs
from radixkv.kv_storage import KVStorage
from radixkv.model import load_model
from radixkv.runner import Runner
from radixkv.step_graphs import record_graphs
from tests.checkpoints import CONFIGS, VOCAB_SIZE, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no CUDA graphs without a GPU"),
]

BLOCK_SIZE = 64
MAX_TOKENS = 512


@pytest.mark.parametrize(("family", "exactness"), [("llama", "fast"), ("gemma2", "fast"), ("llama", "exact")])
def test_graphs_are_right_and_answer_as_launches_do(
    family: str, exactness: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_checkpoint(CONFIGS[family], tmp_path)
    model = load_model(ModelConfig(str(directory), device="cuda", dtype="bfloat16", exactness=exactness))
    kernels = attention_kernels(model, model.kv_shape, BLOCK_SIZE, try_attention_here)
    storage = KVStorage(40, BLOCK_SIZE, model.kv_shape, model.device)
    graphs = record_graphs(
        model, storage, kernels, EngineConfig(max_step_tokens=64, max_running_requests=8), MAX_TOKENS
    )
    assert graphs is not None, caplog.text
    shapes = graphs.shapes
    drop_wrong_graphs(graphs, model, storage, kernels, MAX_TOKENS)
    assert graphs.shapes == shapes, caplog.text

    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB_SIZE, MAX_TOKENS).astype("<u4").tobytes() for _ in range(4)]
    tables = random.permutation(40).astype(np.int32)[:32].reshape(4, 8)
    recorded, launched = Runner(model, storage, kernels, graphs), Runner(model, storage, kernels)
    ends = random.integers(1, 400, 4)
    for prompt, table, end in zip(prompts, tables, ends, strict=True):
        launched.run([Chunk(prompt, 0, int(end), table, None, wants_logits=False)])
    for _ in range(20):
        news = random.integers(1, 16, 4) if random.random() < 0.5 else np.ones(4, dtype=np.int64)
        chunks = [
            Chunk(prompt, int(end), int(end + new), table, None, wants_logits=True)
            for prompt, table, end, new in zip(prompts, tables, ends, news, strict=True)
        ][: random.integers(1, 5)]
        got = recorded.run(chunks)
        got_logits, got_blocks = got.logits.clone(), storage.pool.blocks.clone()
        expected = launched.run(chunks)
        if exactness == "exact":
            assert torch.equal(got_logits, expected.logits)
            assert torch.equal(got_blocks, storage.pool.blocks)
        assert (got_logits - expected.logits).norm() <= 0.05 * expected.logits.norm()
        assert got.is_finite == expected.is_finite == [True] * len(chunks)
