from pathlib import Path

import numpy as np
import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.kv_storage import KVStorage
from radixkv.lease import BlockCopy
from radixkv.model import load_model
from radixkv.runner import Chunk, Runner
from radixkv.triton_kernels import TritonKernels
from tests.checkpoints import CONFIGS, VOCAB_SIZE, load_eager, write_checkpoint
from tests.kernels.interpreter import interpret_kernels


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_whole_model_on_triton_kernels_agrees_with_eager_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma2 alternates layers with and without a window, so one step needs two plans."""
    if not torch.cuda.is_available():
        interpret_kernels(monkeypatch)
    directory = write_checkpoint(CONFIGS[family], tmp_path)
    model = load_model(ModelConfig(path=str(directory)))
    storage = KVStorage(16, 16, model.kv_shape, model.device)
    storage.pool.blocks.fill_(0xFF)
    runner = Runner(model, storage, TritonKernels(is_exact=False))
    first, second, third = (np.random.default_rng(seed).integers(0, VOCAB_SIZE, 50).astype("<u4") for seed in (0, 1, 2))
    second[:21] = third[:21] = first[:21]
    table = np.random.default_rng(2).permutation(16).astype(np.int32)
    runner.run([Chunk(first.tobytes(), 0, 30, table[:4], None, wants_logits=False)])
    shares = [np.concatenate([table[:1], own]) for own in (table[4:7], table[7:10])]
    copies = [BlockCopy(int(table[1]), int(share[1])) for share in shares]
    step = runner.run(
        [
            Chunk(first.tobytes(), 30, 50, table[:4], None, wants_logits=True),
            Chunk(second.tobytes(), 21, 50, shares[0], copies[0], wants_logits=True),
            Chunk(third.tobytes(), 21, 50, shares[1], copies[1], wants_logits=True),
        ]
    )
    assert step.is_finite == [True, True, True]
    oracle = load_eager(directory)
    for row, tokens in zip(step.logits, (first, second, third), strict=True):
        with torch.inference_mode():
            expected = oracle(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0, -1]
        assert (row - expected).abs().max() <= 1e-4
