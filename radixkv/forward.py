"""One forward pass over the pool: what goes in, and what comes out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixkv.attention import AttentionKernels, PagedStep
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.staging import to_device
from radixkv.model import Model


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed tokens of several requests. Laid out on the host, computed on the model's device.

    Attributes:
        input_ids: int64 `[num_tokens]`.
        positions: int64 `[num_tokens]`.
        logit_rows: int64 `[n]`, the rows whose logits are wanted.
        batch: whose tokens these are and where their K/V live.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    batch: PagedBatch

    def to(self, device: torch.device) -> StepInputs:
        """The same on a device; see `to_device`."""
        batch = self.batch
        return StepInputs(
            to_device(self.input_ids, device),
            to_device(self.positions, device),
            to_device(self.logit_rows, device),
            dataclasses.replace(
                batch, block_tables=to_device(batch.block_tables, device), slots=to_device(batch.slots, device)
            ),
        )


class StepOutputs(NamedTuple):
    """What a forward pass computes, on the model's device.

    Attributes:
        logits: float32 `[n, vocab_size]`.
        summary: int64 `[num_tokens + n]`, what the host has to know of each step: for each token whether its K, V and
            last hidden state are finite, then for each row of logits the most likely token. In one piece, so that the
            host waits once.
    """

    logits: torch.Tensor
    summary: torch.Tensor


def compute_step(model: Model, pool: KVPool, kernels: AttentionKernels, inputs: StepInputs) -> StepOutputs:
    """Compute all tokens and write their K/V. Waits for nothing.

    Args:
        model: the weights.
        pool: where K and V are kept.
        kernels: what works on the pool.
        inputs: on the model's device.
    """
    step = PagedStep(pool, inputs.batch, kernels)
    logits, is_finite = model.forward(inputs.input_ids, inputs.positions, step, inputs.logit_rows)
    return StepOutputs(logits, torch.cat((is_finite & step.is_finite, logits.argmax(dim=-1))))
