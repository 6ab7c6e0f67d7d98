"""A runner whose steps a test can stop, and prompts for an engine with it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import StepResult
from tests.fake_runner import FakeRunner, tokens
from tests.patience import PATIENCE_S

NUM_BLOCKS, BLOCK_SIZE = 32, 4
ENDLESS_S = 3600.0  # longer than a test may run


class GatedRunner(FakeRunner):
    """Runs a step only while its gate is open.

    Attributes:
        gate: steps wait until this event is set.
        entered: is set when a step begins to wait for the gate.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, max_tokens)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        return super().run(chunks)


def params(ids: range | list[int], tenant: str = "", adapter: str = "", **fields: Any) -> PrefillParams:
    """Return the parameters of a prefill."""
    return PrefillParams(tokens(ids), Caller(tenant, adapter), **fields)
