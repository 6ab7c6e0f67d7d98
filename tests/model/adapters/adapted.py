"""A checkpoint with adapters, as radixkv serves it, and peft's own forward passes as oracles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from radixkv.compute.forward import Chunk, ChunkState
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.model.adapters.adapter_files import AdapterFiles, read_adapter
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage
from tests.model.adapters.made_by_peft import load_adapted, write_adapter
from tests.model.coverage.small_configs import small_config
from tests.model.exact.checkpoints import VOCAB_SIZE, load_eager, write_checkpoint
from tests.model.exact.exact_cases import MODELS

BLOCK_SIZE = 16
NUM_BLOCKS = 128

# The default is all linear layers. In these families some can't be adapted: the linear layers of experts are not
# modules (peft adapts them as parameters), and `kv_b_proj` is absorbed into queries and attention outputs.
_LATENT_TARGETS = ["kv_a_proj_with_mqa", "o_proj"]
_TARGETS = {
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "deepseek_v2": ["q_proj", *_LATENT_TARGETS],
    "deepseek_v3": ["q_a_proj", "q_b_proj", *_LATENT_TARGETS],
}
_FEW_TARGETS = {
    "phi3": ["qkv_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
    "mixtral": ["q_proj", "v_proj"],
    "deepseek_v2": _LATENT_TARGETS,
    "deepseek_v3": _LATENT_TARGETS,
}


def adapter_options(family: str) -> list[dict[str, Any]]:
    """Return fields of three adapters: all layers, few layers of another rank, and scales by patterns."""
    targets = _TARGETS.get(family, "all-linear")
    few_targets = _FEW_TARGETS.get(family, ["q_proj", "v_proj", "up_proj"])
    return [
        {"target_modules": targets},
        {"target_modules": few_targets, "r": 3, "lora_alpha": 4},
        {
            "target_modules": targets,
            "r": 5,
            "lora_alpha": 3,
            "use_rslora": True,
            "rank_pattern": {few_targets[0]: 7},
            "alpha_pattern": {r".*\.1\..*": 5},
        },
    ]


@dataclass
class Adapted:
    """A served model with adapters loaded.

    Attributes:
        model, runner: as served.
        files: the adapters that were read.
        oracles: transformers' model at index 0, then peft's model of each adapter.
    """

    model: Model
    runner: Runner
    files: list[AdapterFiles]
    oracles: list[PreTrainedModel]

    def digest(self, number: int) -> str:
        """Return the digest of an adapter by its index in `oracles`."""
        return "" if number == 0 else self.files[number - 1].digest

    def expected(self, number: int, tokens: np.ndarray) -> torch.Tensor:
        """Return an oracle's logits after each token, `[num_tokens, vocab_size]`."""
        with torch.inference_mode():
            return self.oracles[number](input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].float()

    def chunk(
        self, number: int, tokens: np.ndarray, start: int, end: int, block_ids: np.ndarray, adapter_from: int = 0
    ) -> Chunk:
        """Make a chunk of a prompt that is computed with an adapter, with the logits after all its tokens.

        The recurrent states of a sequence, if the model has any, are in the slot with the id of its first block.
        """
        slot = int(block_ids[0])
        return Chunk(
            tokens.tobytes(), start, end, block_ids, None,
            wants_logits=True, wants_all_logits=True, adapter=self.digest(number), adapter_from=adapter_from,
            state=None if self.runner.states is None else ChunkState(slot if start else None, [(end, slot)]),
        )  # fmt: skip


def serve(family: str, folder: Path, options: list[dict[str, Any]] | None = None, **settings: Any) -> Adapted:
    """Write a checkpoint and adapters, and load them.

    Args:
        family: a name of `MODELS`, or a model type of transformers.
        folder: to write to.
        options: fields of each adapter.
        settings: of `ModelConfig`.
    """
    checkpoint = write_checkpoint(MODELS.get(family) or small_config(family), folder / "base")
    model = load_model(ModelConfig(path=str(checkpoint), device="cpu", max_adapters=4, **settings))
    assert model.adapted is not None
    files, oracles = [], [load_eager(checkpoint)]
    for seed, fields in enumerate(options or adapter_options(family)):
        directory = write_adapter(checkpoint, folder / f"adapter-{seed}", seed, **fields)
        files.append(read_adapter(directory, model))
        model.adapted.adapters.add(files[-1])
        oracles.append(load_adapted(checkpoint, directory))
    storage = KVStorage(NUM_BLOCKS, BLOCK_SIZE, model.kv_shape, model.device)
    for pool in storage.pools:
        pool.blocks.fill_(0xFF)  # nothing may depend on what was never written
    return Adapted(model, Runner(model, storage, TorchKernels(), num_state_slots=NUM_BLOCKS), files, oracles)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Make a random prompt."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype("<u4")


def tables(count: int, num_blocks: int = 8) -> list[np.ndarray]:
    """Return block tables that share no block."""
    ids = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)
    return [ids[first * num_blocks : (first + 1) * num_blocks] for first in range(count)]
