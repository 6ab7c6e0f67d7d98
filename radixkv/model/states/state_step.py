"""The states of one forward pass: read before the first row of each request, and written after the pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.staging import to_device
from radixkv.storage.state_pool import StatePool


@dataclass(frozen=True, slots=True)
class StateRows:
    """Where the rows of a step, and the states that it writes, find their inputs. Built once per step.

    A layer concatenates the inputs kept in states with the inputs of the step's rows. Indices of inputs refer to the
    result:

        joined   [ kept by request 0 )[ kept by request 1 )[ rows of request 0 ...... )[ rows of request 1 ...... )
                   num_inputs each

    Attributes:
        sources: int64 `[num_requests]`, the slot of each request's state before its first row.
        inputs: int64 `[num_inputs + 1, num_rows]`, the inputs that each row sees, the oldest first, its own last.
        written_inputs: int64 `[num_writes, num_inputs]`, the inputs of each state that the step writes.
        targets: int64 `[num_writes]`, the slots of these states.
    """

    sources: torch.Tensor
    inputs: torch.Tensor
    written_inputs: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def build(
        cls,
        query_starts: Sequence[int],
        sources: Sequence[int],
        writes: Sequence[tuple[int, int, int]],
        num_inputs: int,
    ) -> StateRows:
        """Lay out one step on the host.

        >>> rows = StateRows.build([0, 3, 4], sources=[9, 5], writes=[(0, 2, 7), (1, 1, 5)], num_inputs=2)
        >>> rows.inputs.tolist()  # request 0 has the inputs 0 and 1 before its rows 4, 5 and 6
        [[0, 1, 4, 2], [1, 4, 5, 3], [4, 5, 6, 7]]
        >>> rows.written_inputs.tolist(), rows.targets.tolist()
        ([[4, 5], [3, 7]], [7, 5])

        Args:
            query_starts: `num_requests + 1` positions, from 0 to the number of rows.
            sources: a slot for each request.
            writes: for each state, its request, the number of the request's rows before it, and its slot. Slots are
                distinct.
            num_inputs: number of inputs in a state.
        """
        lengths = [end - start for start, end in itertools.pairwise(query_starts)]
        starts = np.array(query_starts[:-1], dtype=np.int64) + len(lengths) * num_inputs

        def index_of(request: npt.NDArray[np.int64], row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            """Return the index of a request's row; negative rows are inputs that its state kept."""
            return np.where(row >= 0, starts[request] + row, (request + 1) * num_inputs + row)

        # For each row, its request and its position among the rows of this request.
        requests = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(query_starts[-1]) - np.repeat(np.array(query_starts[:-1]), lengths)
        lags = np.arange(-num_inputs, 1)[:, None]
        written_requests, num_rows_before, slots = np.array(writes, dtype=np.int64).reshape(-1, 3).T
        last_positions = num_rows_before[:, None] + np.arange(-num_inputs, 0)
        return cls(
            torch.tensor(sources, dtype=torch.int64),
            torch.from_numpy(index_of(requests, positions + lags)),
            torch.from_numpy(index_of(written_requests[:, None], last_positions)),
            torch.from_numpy(slots.copy()),
        )

    def to(self, device: torch.device) -> StateRows:
        """Return a copy with its tensors on a device; see `to_device`."""
        return StateRows(
            *(to_device(each, device) for each in (self.sources, self.inputs, self.written_inputs, self.targets))
        )


class StateStep:
    """Computes the short convolutions of one forward pass.

    Each row is summed in float32 in a fixed order, the oldest input first. So the bits of the result depend only on the
    row's own inputs.

    `keep` writes all states after the pass. A pass that raises changes no state, so it can be computed again.

    Args:
        pool: the states.
        rows: the rows of this pass.
    """

    def __init__(self, pool: StatePool, rows: StateRows) -> None:
        self._pool = pool
        self._rows = rows
        self._written: dict[int, torch.Tensor] = {}  # by layer: `[num_writes, num_inputs, num_channels]`
        self._is_finite: torch.Tensor | None = None

    def convolve(self, layer: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve the rows of a layer, each with the previous inputs of its own sequence.

        Args:
            layer: index among the layers that keep a state.
            rows: `[num_rows, num_channels]`.
            weight: `[num_channels, num_inputs + 1]`, the oldest input first.
            bias: `[num_channels]`, or None.

        Returns:
            `[num_rows, num_channels]`, in the dtype of `rows`.
        """
        is_finite = rows.isfinite().all(dim=-1)
        self._is_finite = is_finite if self._is_finite is None else self._is_finite & is_finite
        kept_inputs = self._pool.states[self._rows.sources, layer]  # [num_requests, num_inputs, num_channels]
        joined = torch.cat((kept_inputs.flatten(0, 1), rows))
        self._written[layer] = joined[self._rows.written_inputs]
        return convolve([joined[inputs] for inputs in self._rows.inputs], weight, bias)

    def keep(self) -> None:
        """Write the states of the pass. All layers must have convolved."""
        if self._rows.targets.numel():
            layers = [self._written[layer] for layer in range(self._pool.shape.num_layers)]
            self._pool.states[self._rows.targets] = torch.stack(layers, 1)

    @property
    def is_finite(self) -> torch.Tensor | None:
        """Whether the inputs of each row are finite, bool `[num_rows]`; None if no layer has convolved."""
        return self._is_finite


def convolve(inputs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Add up inputs times weights in float32, the oldest input first and the bias last.

    Args:
        inputs: the inputs of each row, the oldest first, each `[num_rows, num_channels]`.
        weight: `[num_channels, len(inputs)]`.
        bias: `[num_channels]`, or None.

    Returns:
        `[num_rows, num_channels]`, in the dtype of the inputs.
    """
    total = inputs[0].float() * weight[:, 0].float()
    for index, each in enumerate(inputs[1:], 1):
        total = total + each.float() * weight[:, index].float()
    if bias is not None:
        total = total + bias.float()
    return total.to(inputs[0].dtype)
