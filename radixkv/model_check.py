"""Refuses a model whose answers a prefix cache would change."""

from __future__ import annotations

import numpy as np
import torch

from radixkv.attention import ATTENTION_NAME
from radixkv.block_pool import BlockIds
from radixkv.errors import UnsupportedModel
from radixkv.kv_storage import KVStorage
from radixkv.model import Model
from radixkv.runner import Chunk, Runner

_BLOCK_SIZE = 16
_NUM_TOKENS = 2 * _BLOCK_SIZE + 5
# Relative distance of the logits. Summation order costs about 1e-6 in float32 and 1e-2 in bfloat16; a window, mask or
# state that got lost costs 1e-1 and more (see tests/test_model_check.py).
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def check_model(model: Model) -> None:
    """Compare a short prompt computed at once, computed in two parts, and computed by transformers' eager attention.

    Raises:
        UnsupportedModel: they disagree, so the model keeps state that the cache does not hold, or its attention is
            not what our kernels compute.
    """
    tokens = ((np.arange(_NUM_TOKENS) * 7919 + 1) % model.vocab_size).astype("<u4").tobytes()
    num_blocks = -(-_NUM_TOKENS // _BLOCK_SIZE)
    runner = Runner(model, KVStorage(2 * num_blocks, _BLOCK_SIZE, model.kv_shape, model.device))
    block_ids = np.arange(2 * num_blocks, dtype=np.int32)
    expected = _eager_logits(model, tokens)
    at_once = _logits(runner, tokens, block_ids[num_blocks:], [_NUM_TOKENS])
    in_parts = _logits(runner, tokens, block_ids[:num_blocks], [_BLOCK_SIZE + 3, _NUM_TOKENS])
    _require_close(model, "computed at once", at_once, expected)
    _require_close(model, "computed over a cached prefix", in_parts, expected)


def _logits(runner: Runner, tokens: bytes, block_ids: BlockIds, ends: list[int]) -> torch.Tensor:
    """Prefill in chunks that end at `ends`; the logits after the last token, `[vocab_size]`."""
    start = 0
    for end in ends:
        logits = runner.run([Chunk(tokens, start, end, block_ids, None, wants_logits=end == ends[-1])])
        start = end
    return logits[0]


@torch.inference_mode()
def _eager_logits(model: Model, tokens: bytes) -> torch.Tensor:
    input_ids = torch.from_numpy(np.frombuffer(tokens, dtype="<u4").astype(np.int64)).to(model.device)
    model.module.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model.module(input_ids=input_ids[None], use_cache=False).logits[0, -1].float()
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)
    return logits


def _require_close(model: Model, how: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    distance = float((got - expected).norm() / expected.norm())
    tolerance = _TOLERANCE[model.kv_shape.dtype]
    if not distance <= tolerance:
        raise UnsupportedModel(
            f"{type(model.module).__name__}: a prompt {how} differs from transformers' own attention: expected a "
            f"relative distance of the logits of at most {tolerance}, got {distance:.2g}"
        )
