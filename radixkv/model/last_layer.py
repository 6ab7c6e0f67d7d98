"""Computes the last layer only for the rows whose logits are needed, and K and V for all rows.

    rows of all tokens ──▶ last layer, until K and V are written
    rows with logits   ──▶ the whole last layer ──▶ norm ──▶ LM head

The output of the last layer for the other rows, which are most rows of a prefill, is not used.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from radixkv.errors import UnsupportedModel
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionCall
from radixkv.model.attention.paged_step import PaddedStep, RunningPass
from radixkv.model.refusals import reason_of

_log = logging.getLogger(__name__)

_TRIAL_TOKENS = 24

# Tolerance of logits in fast mode, relative to the largest logit: matmuls with another row count round differently.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class LastLayerRows(NamedTuple):
    """The rows of a forward pass whose logits are needed; the last layer computes only these.

    Attributes:
        rows: int64 `[n]`, the indices of the rows, at least one.
        write: stores K and V of all tokens in a layer; see `PagedStep.write`.
        read: attends from the queries of these rows; see `PagedStep.read`.
    """

    rows: torch.Tensor
    write: Callable[[int, torch.Tensor, torch.Tensor | None], None]
    read: Callable[[int, torch.Tensor, Scoring], torch.Tensor]


class LastLayer:
    """Restricts the last layer of a model to the rows of `LastLayerRows`.

    Args:
        module: the model. If its last layer is not found, `shortened` raises.
        running: holds the step of a forward pass.
    """

    def __init__(self, module: nn.Module, running: RunningPass) -> None:
        self._name = type(module).__name__
        self._running = running
        # Inside `shortened`: the rows to compute, their indices with padding, and `num_tokens`.
        self._selection: tuple[LastLayerRows, torch.Tensor, int] | None = None
        self._layer = _last_layer(module)

    @contextlib.contextmanager
    def shortened(self, last_rows: LastLayerRows, num_rows: int, num_tokens: int) -> Iterator[None]:
        """Compute only the rows of `last_rows` in the last layer, inside the `with` block.

        Args:
            last_rows: the rows to compute.
            num_rows: number of rows of the layer's output: those of `last_rows`, padded with copies of the last one.
            num_tokens: tokens of the pass, without padding.

        Raises:
            UnsupportedModel: the last layer was not found.
        """
        if self._layer is None:
            raise UnsupportedModel(f"{self._name}: expected layers in a list, the last one with attention, got none")
        padding = last_rows.rows[-1:].expand(num_rows - len(last_rows.rows))
        self._selection = last_rows, torch.cat((last_rows.rows, padding)), num_tokens
        hook = self._layer.register_forward_pre_hook(self._shorten, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._selection = None

    def _shorten(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Write K and V of all tokens, and return the layer's arguments for the rows of `last_rows`. A PyTorch hook."""
        assert self._selection is not None, "inside `shortened`"
        last_rows, padded_rows, num_tokens = self._selection
        with contextlib.suppress(_KVWritten):
            layer.forward(*args, **self._switch_step(kwargs, PaddedStep(_WritingStep(last_rows), num_tokens)))
            raise UnsupportedModel(f"{type(layer).__name__}: expected the last layer to attend, got none that does")
        hidden_states = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        num_all_rows = hidden_states.shape[1]
        kwargs = self._switch_step(kwargs, PaddedStep(_ReadingStep(last_rows), len(last_rows.rows)))
        return _select_rows(args, padded_rows, num_all_rows), _select_rows(kwargs, padded_rows, num_all_rows)

    def _switch_step(self, kwargs: dict[str, Any], step: PaddedStep) -> dict[str, Any]:
        """Set another step for layers that do not get it as an argument, and return the arguments with this step."""
        self._running.step = step
        return {**kwargs, "radix_step": step} if "radix_step" in kwargs else kwargs


@torch.inference_mode()
def can_shorten_last_layer(
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]], vocab_size: int, dtype: torch.dtype, *, is_exact: bool
) -> bool:
    """Check whether rows have the same logits if the last layer computes only them instead of all rows.

    Args:
        forward: `Model.forward`.
        vocab_size: token ids are below this.
        dtype: dtype of the model.
        is_exact: whether all bits must be the same.
    """
    ids = torch.arange(_TRIAL_TOKENS) % vocab_size
    rows = torch.tensor([_TRIAL_TOKENS // 3, _TRIAL_TOKENS - 1])
    step = _EchoStep()
    try:
        expected, _ = forward(ids, ids, step, rows)
        got, _ = forward(ids, ids, step, rows, last_rows=LastLayerRows(rows, step.write, step.read))
    except Exception as error:  # noqa: BLE001 - a layer with other arguments may raise anything
        _log.info("the last layer computes all rows: %s", reason_of(error))
        return False
    if is_exact:
        return torch.equal(expected, got)
    return bool((expected - got).abs().max() <= _TOLERANCE[dtype] * expected.abs().max())


class _KVWritten(Exception):
    """Leaves the layer after K and V are written."""


class _WritingStep(NamedTuple):
    """A step that writes K and V, and then leaves the layer."""

    last_rows: LastLayerRows

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.last_rows.write(call.layer, call.key, call.value)
        raise _KVWritten


class _ReadingStep(NamedTuple):
    """A step over K and V that have been written."""

    last_rows: LastLayerRows

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return self.last_rows.read(call.layer, call.query, call.scoring)


def _last_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer with the attention of the highest index; None unless it ends exactly one list of layers."""
    last_index = max(map(_index_of, module.modules()))
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList) and len(part) == last_index + 1]
    candidates = [layers[-1] for layers in lists if last_index in map(_index_of, layers[-1].modules())]
    return candidates[0] if len(candidates) == 1 else None


def _index_of(part: Any) -> int:
    """Return the layer index of an attention module; -1 for other modules."""
    index = getattr(part, "layer_idx", None)
    return index if isinstance(index, int) else -1


def _select_rows(value: Any, rows: torch.Tensor, num_rows: int) -> Any:
    """Select rows of all tensors `[1, num_rows, ...]` in a layer's arguments."""
    if isinstance(value, torch.Tensor):
        return value[:, rows] if value.shape[:2] == (1, num_rows) else value
    if isinstance(value, dict):
        return {name: _select_rows(each, rows, num_rows) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_select_rows(each, rows, num_rows) for each in value)
    return value


class _EchoStep:
    """A step without a pool, for trials: it returns each query, cut or padded to the size of a value."""

    def __init__(self) -> None:
        self._widths: dict[int, int] = {}  # elements of a head's value, by layer

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.write(call.layer, call.key, call.value)
        return self.read(call.layer, call.query, call.scoring)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor | None) -> None:
        self._widths[layer] = (key if value is None else value).shape[2]

    def read(self, layer: int, query: torch.Tensor, scoring: Scoring) -> torch.Tensor:
        return pad(query, (0, self._widths[layer] - query.shape[2]))

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return rows
