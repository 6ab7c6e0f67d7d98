"""Transfer of K/V between servers, for any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from radixkv.api.caller import Caller
from radixkv.config import KVSourceConfig, TransferConfig
from radixkv.engine.adapters.adapters import Adapters
from radixkv.engine.transfer.lease_exporter import LeaseBlocks, LeaseExporter
from radixkv.engine.transfer.shared_stores import SharedStores
from radixkv.offload.block_keys import BlockFormat
from radixkv.offload.block_mover import BlockMover
from radixkv.offload.index.prompt_blocks import BlockKeyFunction, KeyedBlock
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import BlockObject, ObjectFault, Wanted, object_bytes, open_object
from radixkv.offload.tiers.rejected_blocks import RejectedBlocks
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.storage.layer_bytes import LayerBytes, Layers
from radixkv.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TransferParts:
    """Parts of an engine that the transfer of K/V needs.

    Attributes:
        mover: copies blocks.
        key_blocks: makes the keys of a prompt's blocks.
        block_format: format of the blocks.
        config: whether other servers may fetch, and how much is fetched at a time.
        sources: the servers to fetch from, by the names of their sections.
        layer_bytes: sizes of the layers of a block.
        stores: stores that several servers share.
        mac: authenticates the blocks, with the servers' secret; None without one.
    """

    mover: BlockMover
    key_blocks: BlockKeyFunction
    block_format: BlockFormat
    config: TransferConfig
    sources: Mapping[str, KVSourceConfig]
    layer_bytes: LayerBytes
    stores: SharedStores
    mac: BlockMac | None = None


@dataclass(frozen=True, slots=True)
class FleetAccess:
    """Credentials that the servers of one fleet present to each other.

    Attributes:
        token: presented by the fleet's ingress and servers.
        kv_key: authenticates K/V that the servers of the fleet send to each other.
        tls_ca: PEM file with the authorities of their certificates; None without TLS.
        tls_name: name in the certificates; empty for a server's address.
    """

    token: str = field(repr=False)
    kv_key: bytes = field(repr=False)
    tls_ca: str | None = None
    tls_name: str = ""


class Transfer:
    """Sends K/V of held leases to other servers, and lists the blocks that a prompt needs from another server.

        the server with the lease    FetchKV ─▶ blocks_of ─▶ objects ───┐
                                                                       │ the blocks, as a stream
        the server with the prompt   wanted ─▶ FetchKV ─▶ payload_of ◀──┘ ─▶ Engine.generate(fetched=...)

    Args:
        parts: parts of the engine.
        held_leases: leases that outlive their request.
        adapters: maps names of adapters to digests.
        call: calls a function on the engine's thread between two steps, for a tenant.

    Attributes:
        block_format: format of all blocks.
        object_bytes: bytes of each block as it is sent, of all layers.
        layer_bytes: sizes of the layers of a block.
        stores: stores that several servers share.
        config, sources: see `TransferParts`.
        fleet: the fleet of the server, which may name any address as a source; None without one.
        rejected: received blocks that were not used.
    """

    def __init__(
        self,
        parts: TransferParts,
        held_leases: HeldLeases,
        adapters: Adapters,
        call: Callable[[str, Callable[[], Any]], Future[Any]],
    ) -> None:
        self.block_format = parts.block_format
        self.object_bytes = object_bytes(parts.block_format.block_size, parts.block_format.payload_bytes)
        self.config = parts.config
        self.sources = parts.sources
        self.layer_bytes = parts.layer_bytes
        self.stores = parts.stores
        self.fleet: FleetAccess | None = None
        self.rejected = RejectedBlocks("kv_source")
        self._mac = self._mac_of_members = parts.mac
        self._key_blocks = parts.key_blocks
        self._exports = LeaseExporter(held_leases, parts.mover, parts.key_blocks, parts.layer_bytes)
        self._adapters = adapters
        self._call = call

    def join(self, fleet: FleetAccess) -> None:
        """Accept sources that a fleet names. Without `tiers.secret_file`, its key authenticates their blocks.

        Raises:
            ConfigError: as in `BlockMac`.
        """
        self.fleet = fleet
        if self._mac is None:
            self._mac_of_members = BlockMac(fleet.kv_key, self.block_format.fingerprint)

    def mac_of(self, *, is_member: bool) -> BlockMac | None:
        """Return the MAC that authenticates the blocks of a source; None if the source is trusted without a MAC.

        Args:
            is_member: whether the source is accepted only as a member of this server's fleet; False if a section
                `kv_sources` names it.
        """
        return self._mac_of_members if is_member else self._mac

    def blocks_of(self, lease_id: str, tenant: str) -> Future[LeaseBlocks]:
        """Find the blocks of a held lease; see `LeaseExporter.blocks_of`. The future may raise UnknownLease."""
        return self._call(tenant, lambda: self._exports.blocks_of(lease_id, tenant))

    def objects(
        self,
        lease_id: str,
        tenant: str,
        lease_blocks: LeaseBlocks,
        indices: Sequence[int],
        layers: Layers | None = None,
    ) -> Future[list[BlockObject]]:
        """Copy some blocks of a held lease; see `LeaseExporter.objects`. The future may raise UnknownLease."""
        mac = self._mac_of_members
        return self._call(tenant, lambda: self._exports.objects(lease_id, tenant, lease_blocks, indices, layers, mac))

    def wanted(self, tokens: bytes, caller: Caller) -> list[KeyedBlock]:
        """List the whole blocks of a prompt that can be loaded instead of computed. The last token is always computed.

        Raises:
            UnknownAdapter, InvalidRequest: as in `Adapters.keyed`.

        Complexity: about 1 us per block.
        """
        namespace, key_tokens = self._adapters.keyed(caller, tokens).key  # tokens of an invoked adapter are marked
        return list(self._key_blocks(namespace, key_tokens[:-TOKEN_BYTES]))

    def stores_for(self, blocks: Sequence[KeyedBlock], tenant: str) -> Future[list[str]]:
        """List the shared stores from which a tenant's blocks may be loaded."""
        return self._call(tenant, lambda: self.stores.names_for(blocks))

    def payload_of(self, received: bytes, wanted: KeyedBlock, mac: BlockMac | None) -> memoryview | ObjectFault:
        """Return K and V of a received block if it is the wanted one and unmodified, or else what is wrong with it.

        Any thread may call this. Complexity: one pass over the block for the checksum, and one for the MAC.
        """
        return open_object(
            memoryview(received), Wanted(wanted.key, wanted.tokens, mac), self.block_format.payload_bytes
        )
