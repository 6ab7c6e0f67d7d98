"""Export of the K/V of held leases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixkv.cache.lease import Lease
from radixkv.cache.node import path_to
from radixkv.errors import UnknownLease
from radixkv.offload.block_mover import BlockMover
from radixkv.offload.index.prompt_blocks import BlockKeyFunction, KeyedBlock
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.storage.layer_bytes import LayerBytes, Layers
from radixkv.tokens import TOKEN_BYTES


class LeaseBlocks(NamedTuple):
    """The published whole blocks of a held lease, in the order of its prompt.

    Attributes:
        blocks: their keys and tokens.
        block_ids: their ids, valid as long as the lease is held.
    """

    blocks: Sequence[KeyedBlock]
    block_ids: Sequence[int]


class LeaseExporter:
    """Copies K/V of held leases out of the pool. Only the engine's thread uses it.

    Tokens that a request did not publish, and a last block that is not full, are left out: the receiver computes them.

    Args:
        held_leases: the leases.
        mover: copies blocks.
        key_blocks: makes the keys of a prompt's blocks.
        layer_bytes: sizes of the layers of a block.
    """

    def __init__(
        self,
        held_leases: HeldLeases,
        mover: BlockMover,
        key_blocks: BlockKeyFunction,
        layer_bytes: LayerBytes,
    ) -> None:
        self._held_leases = held_leases
        self._mover = mover
        self._key_blocks = key_blocks
        self._layer_bytes = layer_bytes

    def blocks_of(self, lease_id: str, tenant: str) -> LeaseBlocks:
        """Find the blocks that a lease holds. Blocks of its prompt that were cached later are left out.

        Raises:
            UnknownLease: this tenant holds no such lease, or its prompt was purged.

        Complexity: a hash of the prompt.
        """
        lease, num_tokens = self._lease(lease_id, tenant)
        path = () if lease.node is None else path_to(lease.node)
        root_prefix = lease.root_prefix
        cached = b"".join((root_prefix.tokens, *(node.tokens for node in path)))
        tokens = cached[: num_tokens * TOKEN_BYTES]  # the last node may have grown since the lease was held
        blocks = tuple(self._key_blocks(lease.namespace._replace(public_prefix=""), tokens))
        block_ids = np.frombuffer(b"".join((root_prefix.block_ids, *(node.block_ids for node in path))), np.int32)
        return LeaseBlocks(blocks, block_ids[: len(blocks)].tolist())

    def objects(
        self,
        lease_id: str,
        tenant: str,
        lease_blocks: LeaseBlocks,
        indices: Sequence[int],
        layers: Layers | None = None,
        mac: BlockMac | None = None,
    ) -> list[BlockObject]:
        """Copy blocks of a lease.

        Args:
            lease_id, tenant: id and tenant of the lease.
            lease_blocks: its blocks.
            indices: indices in `lease_blocks` of the blocks to copy; if empty, only the lease is checked.
            layers: the layers to copy; None for all.
            mac: authenticates whole blocks; None to send them without a MAC. Objects with only some layers never have a
                MAC, since nothing in them states which layers these are.

        Raises:
            UnknownLease: as in `blocks_of`; the lease may have ended in the meantime.
        """
        self._lease(lease_id, tenant)
        read_blocks = self._mover.read([lease_blocks.block_ids[index] for index in indices]) if indices else None
        payloads = [] if read_blocks is None else read_blocks.payloads
        if layers is not None and layers.num < self._layer_bytes.num_layers:
            mac = None
        if read_blocks is not None and layers is not None:
            read_blocks.copy.wait()  # `cut` may copy
            payloads = [self._layer_bytes.cut(payload, layers) for payload in payloads]
        blocks = [lease_blocks.blocks[index] for index in indices]
        return [
            BlockObject(
                block.key,
                block.parent,
                0,
                block.tokens,
                payload,
                mac,
                None if read_blocks is None else read_blocks.copy.wait,
            )
            for block, payload in zip(blocks, payloads, strict=True)
        ]

    def _lease(self, lease_id: str, tenant: str) -> tuple[Lease, int]:
        lease, num_tokens = self._held_leases.lease_of(lease_id, tenant)
        if lease.is_revoked:
            raise UnknownLease("lease_id: expected a lease whose prompt is cached, got one whose prompt was purged")
        return lease, num_tokens
