"""Runs a model with transformers, after a prefix in the cache of transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from radixkv.integrations.transformers.model_requirements import cache_name
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.model import Model

Tokens = npt.NDArray[np.uint32]


class TransformersPrefix:
    """The same model run by transformers with SDPA, with K and V of one long prompt in its cache.

    It computes inside `running`, which replaces our attention and kernels by those of transformers. The replacement
    takes milliseconds, so only calls inside the `with` statement should be timed.

    Args:
        model: a model with our attention and kernels.
        tokens: the prompt.
        step_tokens: maximum number of tokens per forward pass.
    """

    def __init__(self, model: Model, tokens: Tokens, step_tokens: int) -> None:
        self._model = model
        self._module = model.module
        self._device = model.device
        self._tokens = tokens
        self._step_tokens = step_tokens
        self._cache = DynamicCache()
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_computed = 0  # tokens whose K and V are in `_layers`

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the model with transformers' own attention and layers inside a `with` statement; then restore ours."""
        self._module.set_attn_implementation("sdpa")
        try:
            with self._model.unfused():
                yield
        finally:
            self._module.set_attn_implementation(ATTENTION_NAME)

    def restore(self, num_tokens: int) -> None:
        """Fill the cache with K and V of the first `num_tokens` tokens of the prompt, and nothing else."""
        if num_tokens > self._num_computed:
            self._fill(self._num_computed)
            for start in range(self._num_computed, num_tokens, self._step_tokens):
                self.logits(self._tokens[start : min(num_tokens, start + self._step_tokens)], start)
            self._layers = [(layer.keys, layer.values) for layer in self._cache.layers]
            self._num_computed = num_tokens
        self._fill(num_tokens)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _fill(self, num_tokens: int) -> None:
        self._cache = DynamicCache()
        for index, (keys, values) in enumerate(self._layers if num_tokens else ()):
            self._cache.update(keys[:, :, :num_tokens], values[:, :, :num_tokens], index)

    def next_token(self, suffix: Tokens, start: int) -> int:
        """Return the most likely token after the suffix. Waits for the device."""
        return int(self._forward(suffix, start).argmax())

    def logits(self, suffix: Tokens, start: int) -> npt.NDArray[np.float32]:
        """Return the logits after the suffix, whose first token is at position `start`."""
        logits: npt.NDArray[np.float32] = self._forward(suffix, start).float().cpu().numpy()
        return logits

    @torch.inference_mode()
    def _forward(self, suffix: Tokens, start: int) -> torch.Tensor:
        ids = torch.from_numpy(suffix.astype(np.int64)).to(self._device)[None]
        positions = torch.arange(start, start + len(suffix), device=self._device)[None]
        cached = {cache_name(self._module): self._cache}
        output = self._module(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **cached)
        logits: torch.Tensor = output.logits[0, -1]
        return logits
