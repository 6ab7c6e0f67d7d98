"""The token rows of one step, as layers see them that keep a state: what comes before each row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from radixkv.kernels.staging import to_device


@dataclass(frozen=True, slots=True)
class StateRows:
    """The places where rows of a step find the inputs before them, and the states that it leaves. Built once a step.

    A layer joins the inputs that states kept with those of the step's rows. All indices count in that:

        joined   [ kept by request 0 )[ kept by request 1 )[ rows of request 0 ...... )[ rows of request 1 ...... )
                   num_inputs each

    Attributes:
        sources: int64 `[num_requests]`, the slot of each request's state before its first row.
        inputs: int64 `[num_inputs + 1, num_rows]`, the inputs that each row sees, the oldest first, itself last.
        left: int64 `[num_writes, num_inputs]`, the inputs of each state that the step leaves.
        targets: int64 `[num_writes]`, the slots where these go.
    """

    sources: torch.Tensor
    inputs: torch.Tensor
    left: torch.Tensor
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
        >>> rows.left.tolist(), rows.targets.tolist()
        ([[4, 5], [3, 7]], [7, 5])

        Args:
            query_starts: `num_requests + 1` of them, from 0 to the number of rows.
            sources: a slot for each request.
            writes: request, rows of it after which a state is kept, and the slot where it goes. No slot twice.
            num_inputs: inputs that a state keeps.
        """
        lengths = [end - start for start, end in itertools.pairwise(query_starts)]
        starts = np.array(query_starts[:-1], dtype=np.int64) + len(lengths) * num_inputs

        def joined(request: npt.NDArray[np.int64], row: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            """Return the index of a request's row, counted from its first one; those before that are kept ones."""
            return np.where(row >= 0, starts[request] + row, (request + 1) * num_inputs + row)

        request = np.repeat(np.arange(len(lengths)), lengths)
        row = np.arange(query_starts[-1]) - np.repeat(np.array(query_starts[:-1]), lengths)
        lags = np.arange(-num_inputs, 1)[:, None]
        table = np.array(writes, dtype=np.int64).reshape(-1, 3)
        return cls(
            torch.tensor(sources, dtype=torch.int64),
            torch.from_numpy(joined(request, row + lags)),
            torch.from_numpy(joined(table[:, :1], table[:, 1:2] + np.arange(-num_inputs, 0))),
            torch.from_numpy(table[:, 2].copy()),
        )

    def to(self, device: torch.device) -> StateRows:
        """Return the same with its tensors on a device; see `to_device`."""
        return StateRows(*(to_device(each, device) for each in (self.sources, self.inputs, self.left, self.targets)))
