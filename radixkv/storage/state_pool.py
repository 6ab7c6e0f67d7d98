"""The memory of recurrent states, which some layers keep for each sequence instead of K/V."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StateShape:
    """The state of one sequence in one model: the last inputs of its short convolutions.

    Attributes:
        num_layers: layers that keep a state.
        num_inputs: number of inputs that each of them keeps.
        num_channels: elements of an input.
        dtype: data type of the elements.
    """

    num_layers: int
    num_inputs: int
    num_channels: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state of one sequence, all layers."""
        return math.prod((self.num_layers, self.num_inputs, self.num_channels)) * self.dtype.itemsize


class StatePool:
    """Slots for states, and one more slot, of zeros: the state before the first token.

        slots   [ 0 )[ 1 )[ ...  )[ num_slots - 1 )[ start: zeros, never written )

    Attributes:
        num_slots: slots that may be written.
        start: index of the slot of zeros.
        shape: the state of one sequence.
        states: `[num_slots + 1, num_layers, num_inputs, num_channels]`, zeroed.

    Raises:
        ConfigError: the device does not have enough memory.
    """

    def __init__(self, num_slots: int, shape: StateShape, device: torch.device) -> None:
        self.num_slots = self.start = num_slots
        self.shape = shape
        size = (num_slots + 1, shape.num_layers, shape.num_inputs, shape.num_channels)
        try:
            self.states = torch.zeros(size, dtype=shape.dtype, device=device)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise ConfigError(
                f"cache.state_bytes: {num_slots} states need {num_slots * shape.slot_bytes} bytes on {device}, which "
                "can't be allocated"
            ) from error
