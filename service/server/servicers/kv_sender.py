"""Answers `FetchKV`: sends the K/V of a held lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from radixkv.errors import InvalidRequest, SwitchedOff, UnknownLease
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.servicers.engine_calls import result_of
from radixkv.service.server.servicers.messages import require_names
from radixkv.v1 import prefill_pb2

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine
    from radixkv.engine.transfer.lease_exporter import LeaseBlocks
    from radixkv.engine.transfer.transfer import Transfer
    from radixkv.storage.layer_bytes import Layers

# Bytes of K/V that are copied between two engine steps, in about 1 ms. A busy engine sends this much per step.
_SLICE_BYTES = 8 << 20
_MAX_DATA_BYTES = 1 << 20
_MAX_STORES = 16


class KVSender:
    """Sends blocks as fast as the caller reads: the next blocks are copied only after the previous ones were sent.

    For a block in a store that the caller can read too, it sends a handle and copies nothing.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox

    async def responses(self, request: prefill_pb2.FetchKVRequest) -> AsyncIterator[prefill_pb2.FetchKVResponse]:
        """Validate a request and yield the responses.

        Raises:
            SwitchedOff: this service sends no K/V.
            InvalidRequest: a field is out of range.
            UnknownLease: this tenant does not hold such a lease, or the service was restarted.
            Draining, StepHangs: the engine accepts no calls.
        """
        transfer = self._engine.transfer
        epoch = self._engine.limits.epoch
        if transfer is None or not transfer.config.sends:
            raise SwitchedOff("FetchKV: this server does not send K/V; set transfer.serve in its configuration")
        require_names(tenant=request.tenant, lease_id=request.lease_id)
        if request.epoch not in (0, epoch):
            raise UnknownLease("epoch: this server has restarted since, so its leases are lost")
        layers = transfer.layer_bytes.range_of(request.first_layer, request.num_layers)
        stores = _requested_stores(request, transfer)
        lease = await result_of(self._engine, self._mailbox, transfer.blocks_of(request.lease_id, request.tenant))
        num_blocks = len(lease.blocks)
        if request.first_block > num_blocks:
            raise InvalidRequest(f"first_block: expected at most the {num_blocks} blocks, got {request.first_block}")
        yield prefill_pb2.FetchKVResponse(format=_format(transfer, num_blocks, epoch, layers))
        # The engine copies whole blocks, whichever layers are sent.
        num_blocks_at_once = max(1, _SLICE_BYTES // transfer.block_format.payload_bytes)
        for start in range(request.first_block, num_blocks, num_blocks_at_once):
            indices = range(start, min(start + num_blocks_at_once, num_blocks))
            handles = await self._find_handles(transfer, stores, lease, indices)
            without_handle = [index for index in indices if index not in handles]
            copies_future = transfer.objects(request.lease_id, request.tenant, lease, without_handle, layers)
            copies = await result_of(self._engine, self._mailbox, copies_future)
            objects = dict(zip(without_handle, await asyncio.to_thread(_join_pieces, copies), strict=True))
            for index in indices:
                if index in handles:
                    yield prefill_pb2.FetchKVResponse(block=index, handle=handles[index])
                    continue
                block_data = objects.pop(index)
                for offset in range(0, len(block_data), _MAX_DATA_BYTES):
                    yield prefill_pb2.FetchKVResponse(block=index, data=block_data[offset : offset + _MAX_DATA_BYTES])

    async def _find_handles(
        self, transfer: Transfer, stores: Sequence[str], lease: LeaseBlocks, indices: Sequence[int]
    ) -> dict[int, prefill_pb2.KVHandle]:
        """Find the blocks that are in a shared store. A store that does not respond counts as empty."""
        handles: dict[int, prefill_pb2.KVHandle] = {}
        for store in stores:
            without_handle = [index for index in indices if index not in handles]
            future = transfer.stores.exists(store, [lease.blocks[index] for index in without_handle])
            are_stored = await result_of(self._engine, self._mailbox, future)
            if not are_stored:
                continue
            for index, is_stored in zip(without_handle, are_stored, strict=True):
                if is_stored:
                    handles[index] = prefill_pb2.KVHandle(store=store, key=lease.blocks[index].key)
        return handles


def _join_pieces(objects: Sequence[BlockObject]) -> list[bytes]:
    """Return the bytes of objects. Waits until the objects are copied; authenticating them takes as long as copying."""
    return [b"".join(each.pieces()) for each in objects]


def _requested_stores(request: prefill_pb2.FetchKVRequest, transfer: Transfer) -> list[str]:
    """Return the requested stores that this server has."""
    if not request.stores:
        return []
    if request.first_layer or request.num_layers:
        raise InvalidRequest("stores: can't be combined with a range of layers, because stores hold whole blocks")
    if len(request.stores) > _MAX_STORES:
        raise InvalidRequest(f"stores: expected at most {_MAX_STORES}, got {len(request.stores)}")
    return [name for name in transfer.stores.names() if name in request.stores]


def _format(transfer: Transfer, num_blocks: int, epoch: int, layers: Layers) -> prefill_pb2.KVFormat:
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
        num_layers=transfer.layer_bytes.num_layers,
        first_layer=layers.first,
        sent_layers=layers.num,
        sent_bytes=transfer.layer_bytes.size_of(layers.num),
    )
