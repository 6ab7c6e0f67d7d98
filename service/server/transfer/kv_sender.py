"""Answers `FetchKV`: sends the K/V of a held lease."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from radixkv.errors import InvalidRequest, SwitchedOff, UnknownLease
from radixkv.service.server.calls import answer_of
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.messages import require_names
from radixkv.v1 import prefill_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine
    from radixkv.engine.transfer.transfer import Transfer

# Copied between two steps, in about 1 ms. A busy engine sends as much a step.
_SLICE_BYTES = 8 << 20
_MAX_DATA_BYTES = 1 << 20


class KVSender:
    """Sends blocks as fast as the caller reads: the next ones are copied when those before them have left."""

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox

    async def responses(self, request: prefill_pb2.FetchKVRequest) -> AsyncIterator[prefill_pb2.FetchKVResponse]:
        """Read a request and answer it.

        Raises:
            SwitchedOff: this service sends no K/V.
            InvalidRequest: a field is out of range.
            UnknownLease: this tenant holds no such lease, holds it no more, or the service has started again.
            Draining, StepHangs: the engine takes no calls.
        """
        transfer, epoch = self._engine.transfer, self._engine.limits.epoch
        if transfer is None or not transfer.config.sends:
            raise SwitchedOff("FetchKV: expected transfer.serve to be on, got a service without it")
        require_names(tenant=request.tenant, lease_id=request.lease_id)
        if request.epoch not in (0, epoch):
            raise UnknownLease("epoch: expected that of this start of the service, got another")
        found = await answer_of(self._engine, self._mailbox, transfer.blocks_of(request.lease_id, request.tenant))
        num_blocks = len(found.blocks)
        if request.first_block > num_blocks:
            raise InvalidRequest(f"first_block: expected at most the {num_blocks} blocks, got {request.first_block}")
        yield prefill_pb2.FetchKVResponse(format=_format(transfer, num_blocks, epoch))
        num_at_once = max(1, _SLICE_BYTES // transfer.block_format.payload_bytes)
        for start in range(request.first_block, num_blocks, num_at_once):
            copied = transfer.objects(request.lease_id, request.tenant, found, start, start + num_at_once)
            objects = await answer_of(self._engine, self._mailbox, copied)
            for index, each in enumerate(objects, start):
                data = b"".join(each.pieces())
                for offset in range(0, len(data), _MAX_DATA_BYTES):
                    yield prefill_pb2.FetchKVResponse(block=index, data=data[offset : offset + _MAX_DATA_BYTES])


def _format(transfer: Transfer, num_blocks: int, epoch: int) -> prefill_pb2.KVFormat:
    block_format = transfer.block_format
    return prefill_pb2.KVFormat(
        fingerprint=block_format.fingerprint,
        model_fingerprint=block_format.model,
        dtype=block_format.dtype,
        kv_dtype=block_format.kv_dtype,
        layout=block_format.layout,
        block_size=block_format.block_size,
        block_bytes=block_format.payload_bytes,
        num_blocks=num_blocks,
        epoch=epoch,
    )
