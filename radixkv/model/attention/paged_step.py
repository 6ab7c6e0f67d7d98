"""The attention function that transformers calls in each layer, and the step that it hands K, V and queries to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import AttentionInterface

from radixkv.errors import InvariantViolation, UnsupportedModel
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionKernels, AttentionStep, ConvolutionStep, WatchedRows
from radixkv.model.attention.latent_heads import latent_heads_of
from radixkv.model.states.state_step import StateStep

ATTENTION_NAME = "radixkv_paged"

# Keywords that transformers passes to every attention function and that do not change the result of a prefill.
_WITHOUT_EFFECT = frozenset(
    {"position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_router_logits"}
)


class PagedStep:
    """One forward pass over the pool: each layer writes its new K/V, then attends over prefix and suffix.

    Args:
        pool: the K/V memory.
        batch: the token rows of this pass.
        kernels: the operations on the pool.
        watched: rows whose queries somebody looks at.
        is_reading: whether K and V of all tokens are in the pool already, and are left as they are.
        states: the states of the sequences; None if the model keeps none.
    """

    def __init__(
        self,
        pool: KVPool,
        batch: PagedBatch,
        kernels: AttentionKernels,
        watched: Sequence[WatchedRows] = (),
        *,
        is_reading: bool = False,
        states: StateStep | None = None,
    ) -> None:
        self._pool = pool
        self._batch = batch
        self._kernels = kernels
        self._watched = watched
        self._is_reading = is_reading
        self._states = states
        self._largest: torch.Tensor | None = None  # magnitude in K and V of each token and KV head, all layers so far

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`. All K and V are read from the pool, also those just written."""
        self.write(layer, key, value)
        return self.read(layer, query, scoring)

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `ConvolutionStep.convolve`.

        Raises:
            InvariantViolation: the step has no states.
        """
        if self._states is None:
            raise InvariantViolation("convolution: expected a step with states, got one without")
        return self._states.convolve(layer, rows, weight, bias)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """Write K and V of a layer, rotated where the pool stores rotated vectors; shapes as in `attend`."""
        if self._largest is None:
            self._largest = key.new_zeros(key.shape[:2], dtype=torch.float32)
        if self._is_reading:
            return
        if self._pool.is_rotated:
            key = self._kernels.rotate(key, torch.float32)
            value = None if value is None else self._kernels.rotate(value, torch.float32)
        self._kernels.write_kv(key, value, self._batch.slots, self._pool, layer, self._largest)

    def read(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attend over K and V that are written; arguments and result as in `attend`.

        Over a pool of rotated vectors queries are rotated like keys, which leaves their scores as they are, and what is
        attended is rotated back.
        """
        if not self._pool.is_rotated:
            return self._read(layer, query, scoring)
        rotate, dtype = self._kernels.rotate, query.dtype
        return rotate(self._read(layer, rotate(query, dtype), scoring), dtype)

    def _read(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        for start, end, watcher in self._watched:
            watcher.see(layer, query[start:end], scoring)
        return self._kernels.paged_attention(query, self._pool, layer, self._batch, scoring)

    @property
    def is_finite(self) -> torch.Tensor:
        """Whether all K, V and inputs of states so far are finite as they are stored, bool `[num_tokens]`.

        Raises:
            InvariantViolation: no layer has attended yet.
        """
        if self._largest is None:
            raise InvariantViolation("attention: no layer of the model has attended")
        largest = self._largest.amax(dim=1)
        is_finite = (largest if self._pool.scales is not None else largest.to(self._pool.dtype)).isfinite()
        states = None if self._states is None else self._states.is_finite
        return is_finite if states is None else is_finite & states


class RunningPass:
    """Knows the step of a model's running forward pass, for layers that do not pass keywords on to their attention.

    Attributes:
        step: the step; None between two passes.
    """

    def __init__(self) -> None:
        self.step: AttentionStep | None = None

    @contextmanager
    def with_step(self, step: AttentionStep) -> Iterator[None]:
        """Let layers find a step inside the `with` block."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


class PaddedStep:
    """Passes the first tokens of a padded batch on to another step. The attention of the padding is 0.

    Args:
        step: computes the attention of the real tokens.
        num_tokens: number of real tokens.
    """

    def __init__(self, step: AttentionStep, num_tokens: int) -> None:
        self._step = step
        self._num_tokens = num_tokens

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        scoring: Scoring,
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        real = slice(self._num_tokens)
        with torch._C.DisableTorchFunction():  # the kernels are exact by themselves
            real_value = None if value is None else value[real]
            attended = self._step.attend(layer, query[real], key[real], real_value, scoring)
        padding = attended.new_zeros(query.shape[0] - self._num_tokens, *attended.shape[1:])
        return torch.cat((attended, padding))

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `ConvolutionStep.convolve`. The result for the padding is 0."""
        step = cast("ConvolutionStep", self._step)  # a model that convolves is given no other
        with torch._C.DisableTorchFunction():
            convolved = step.convolve(layer, rows[: self._num_tokens], weight, bias)
        return torch.cat((convolved, convolved.new_zeros(len(rows) - self._num_tokens, rows.shape[1])))


def kv_layer_of(module: Any) -> int:
    """Return the index of a layer among those that have K and V; layers that keep a state are not counted."""
    return int(getattr(module, "kv_layer", module.layer_idx))


def _attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_query_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor | None,  # like the key; None of latent attention
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    radix_step: AttentionStep | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend in one layer. Transformers calls this in every attention layer.

    Returns:
        Attention `[1, num_tokens, num_query_heads, head_dim]`, and None in place of weights.

    Raises:
        UnsupportedModel: the layer asks for something that the kernels do not do; the message names it.
    """
    layer = type(module).__name__
    if radix_step is None and isinstance(running := getattr(module, "running_pass", None), RunningPass):
        radix_step = running.step
    if radix_step is None:
        raise UnsupportedModel(f"{layer}: expected to attend in a forward pass over the cache, got none")
    if not hasattr(module, "layer_idx"):
        raise UnsupportedModel(f"{layer}: expected an attribute `layer_idx`, got none")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise UnsupportedModel(f"{layer}: expected causal attention, got attention that looks ahead")
    if attention_mask is not None or dropout:
        raise UnsupportedModel(f"{layer}: expected no attention mask and no dropout, got a mask or dropout {dropout}")
    for name, given in others.items():
        if given is not None and name not in _WITHOUT_EFFECT:
            raise UnsupportedModel(f"{layer}: passes `{name}` to its attention, which is not supported")
    if s_aux is not None and (s_aux.shape != query.shape[1:2] or softcap is not None):
        raise UnsupportedModel(
            f"{layer}: expected `s_aux` of one sink a query head and no `softcap`, got {tuple(s_aux.shape)}, {softcap}"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scoring = Scoring(scale, sliding_window, softcap, s_aux)
    rows, keys = query[0].transpose(0, 1), key[0].transpose(0, 1)
    index = kv_layer_of(module)
    if value is not None:
        return radix_step.attend(index, rows, keys, value[0].transpose(0, 1), scoring)[None], None
    heads = latent_heads_of(module)
    return heads.values(radix_step.attend(index, heads.queries(rows), keys, None, scoring))[None], None


AttentionInterface.register(ATTENTION_NAME, _attention_forward)
