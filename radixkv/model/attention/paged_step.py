"""The attention of one forward pass over the block pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from radixkv.errors import InvariantViolation
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.attention import Queries
from radixkv.kernels.native.layer import KVView
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionCall, AttentionKernels, AttentionStep, WatchedRows
from radixkv.model.states.state_step import StateStep
from radixkv.storage.layer_groups import LayerLocation


class PagedStep:
    """One forward pass over the pool: each layer writes its new K/V, then attends over prefix and suffix.

    Args:
        pool: the K/V memory.
        batch: the token rows of this pass.
        kernels: the operations on the pool.
        watched: rows whose queries are observed.
        is_reading: whether K and V of all tokens are already in the pool, and are not written.
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
        self._max_magnitudes: torch.Tensor | None = None  # see `reference.write_kv`

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionStep.attend`. All K and V are read from the pool, including those just written."""
        self.write(call.layer, call.key, call.value)
        return self.read(call.layer, call.query, call.scoring)

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve new tokens, each with the previous inputs of its own sequence; see `StateStep.convolve`.

        Raises:
            InvariantViolation: the step has no states.
        """
        if self._states is None:
            raise InvariantViolation("convolution: expected a step with states, got one without")
        return self._states.convolve(layer, rows, weight, bias)

    def view(self, layers: Sequence[int], queries: Queries, num_kv_heads: int, scoring: Scoring) -> KVView | None:
        """Return the K/V of layers for C++ code that writes and attends directly instead of calling `attend`.

        Args:
            layers: indices of the layers, at least one.
            queries: the memory layout of the queries of each layer, for all tokens of the step.
            num_kv_heads: KV heads of each layer.
            scoring: how scores are computed, and which keys a query sees, in all of these layers.

        Returns:
            The view; None if the layers must call `attend`, or are not all in one pool.
        """
        view = getattr(self._kernels, "view", None)
        if view is None or self._watched or self._is_reading or self._pool.rotates_values:
            return None
        max_magnitudes = self._magnitudes_like(self._batch.slots, queries.num_tokens, num_kv_heads)
        kv_view: KVView | None = view(queries, num_kv_heads, self._pool, layers, self._batch, scoring, max_magnitudes)
        return kv_view

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """Write K and V of a layer, V after the Hadamard transform if the pool needs it; shapes as in `attend`."""
        max_magnitudes = self._magnitudes_like(key, *key.shape[:2])  # even if nothing is written, for `is_finite`
        if self._is_reading:
            return
        if self._pool.rotates_values and value is not None:
            value = self._kernels.hadamard_transform(value, torch.float32)
        self._kernels.write_kv(key, value, self._batch.slots, self._pool, layer, max_magnitudes)

    def _magnitudes_like(self, like: torch.Tensor, num_tokens: int, num_kv_heads: int) -> torch.Tensor:
        if self._max_magnitudes is None:
            self._max_magnitudes = like.new_zeros((num_tokens, num_kv_heads), dtype=torch.float32)
        return self._max_magnitudes

    def read(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """Attend over K and V in the pool; arguments and result as in `attend`.

        If the pool holds transformed values, the output is transformed back.
        """
        for start, end, watcher in self._watched:
            watcher.see(layer, query[start:end], scoring)
        attended = self._kernels.paged_attention(query, self._pool, layer, self._batch, scoring)
        return self._kernels.hadamard_transform(attended, query.dtype) if self._pool.rotates_values else attended

    @property
    def is_finite(self) -> torch.Tensor:
        """Whether all K, V and inputs of states that were stored so far are finite, bool `[num_tokens]`.

        Raises:
            InvariantViolation: no layer has attended yet.
        """
        if self._max_magnitudes is None:
            raise InvariantViolation("attention: no layer of the model has attended")
        max_magnitudes = self._max_magnitudes.amax(dim=1)
        if self._pool.scales is None:  # K and V are stored in the dtype of the pool, where large numbers may overflow
            max_magnitudes = max_magnitudes.to(self._pool.dtype)
        is_finite = max_magnitudes.isfinite()
        are_states_finite = None if self._states is None else self._states.is_finite
        return is_finite if are_states_finite is None else is_finite & are_states_finite


class RunningPass:
    """Holds the step of the running forward pass, for layers that do not pass keywords on to their attention.

    Attributes:
        step: the step; None between two passes.
    """

    def __init__(self) -> None:
        self.step: AttentionStep | None = None

    @contextmanager
    def with_step(self, step: AttentionStep) -> Iterator[None]:
        """Set the step inside the `with` block."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


class PaddedStep:
    """Passes the real tokens of a padded batch to another step. The attention output of the padding is 0.

    Args:
        step: computes the attention of the real tokens.
        num_tokens: number of real tokens.
    """

    def __init__(self, step: AttentionStep, num_tokens: int) -> None:
        self._step = step
        self._num_tokens = num_tokens

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        layer, query, key, value, scoring = call
        real_rows = slice(self._num_tokens)
        with torch._C.DisableTorchFunction():  # bypasses `ExactFunctions`: the kernels are exact already
            real_value = None if value is None else value[real_rows]
            attended = self._step.attend(AttentionCall(layer, query[real_rows], key[real_rows], real_value, scoring))
        if len(attended) == len(query):
            return attended
        padding = attended.new_zeros(query.shape[0] - self._num_tokens, *attended.shape[1:])
        return torch.cat((attended, padding))

    def view(self, layers: Sequence[int], queries: Queries, num_kv_heads: int, scoring: Scoring) -> KVView | None:
        """See `PagedStep.view`; None for a padded batch."""
        view = getattr(self._step, "view", None)
        if view is None or queries.num_tokens != self._num_tokens:
            return None
        kv_view: KVView | None = view(layers, queries, num_kv_heads, scoring)
        return kv_view

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `PagedStep.convolve`. The result for the padding is 0."""
        step: Any = self._step  # models with convolutions only run with steps that convolve
        with torch._C.DisableTorchFunction():
            convolved = step.convolve(layer, rows[: self._num_tokens], weight, bias)
        return torch.cat((convolved, convolved.new_zeros(len(rows) - self._num_tokens, rows.shape[1])))


class GroupedStep:
    """Passes the calls of each layer to the step over the layer's pool.

    Args:
        steps: the step over each pool.
        locations: for each layer, its pool and its index there. A pool may have no layers.
    """

    def __init__(self, steps: Sequence[PagedStep], locations: Sequence[LayerLocation]) -> None:
        self._steps = steps
        self._locations = locations
        self._used_steps = [steps[pool] for pool in sorted({location.pool for location in locations})]

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        pool, own_layer = self._locations[call.layer]
        return self._steps[pool].attend(call._replace(layer=own_layer))

    def view(self, layers: Sequence[int], queries: Queries, num_kv_heads: int, scoring: Scoring) -> KVView | None:
        """See `PagedStep.view`."""
        locations = [self._locations[layer] for layer in layers]
        if len({location.pool for location in locations}) > 1:
            return None
        return self._steps[locations[0].pool].view([layer for _, layer in locations], queries, num_kv_heads, scoring)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """See `PagedStep.write`."""
        pool, own_layer = self._locations[layer]
        self._steps[pool].write(own_layer, key, value)

    def read(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        """See `PagedStep.read`."""
        pool, own_layer = self._locations[layer]
        return self._steps[pool].read(own_layer, query, scoring)

    @property
    def is_finite(self) -> torch.Tensor:
        """Whether all that was stored for each token is finite in all pools, bool `[num_tokens]`; see `PagedStep`."""
        is_finite, *in_other_pools = (step.is_finite for step in self._used_steps)
        for is_finite_there in in_other_pools:
            is_finite = is_finite & is_finite_there
        return is_finite
