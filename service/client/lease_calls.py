"""The calls of a client about leases that it holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from google.protobuf.message import Message

from radixkv.service.client.streams import AnswerStream, AsyncAnswerStream
from radixkv.v1.prefill_pb2 import (
    FetchKVRequest,
    FetchKVResponse,
    ReleaseRequest,
    ReleaseResponse,
    RenewRequest,
    RenewResponse,
)
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub


class LeaseCalls:
    """Calls of `Client` about leases that `prefill(hold_lease=True)` handed out."""

    _prefill: PrefillServiceStub

    def release(self, lease_id: str, *, tenant: str = "") -> ReleaseResponse:
        """Give back a lease: the prompt's blocks may be evicted again.

        Args:
            lease_id: of the answer that handed it out.
            tenant: that it was handed out to. Empty: with a tenant's credential that tenant, else the one without name.

        Returns:
            An empty answer.

        Raises:
            TypeError, ValueError: an argument is no text in UTF-8; nothing was sent.
            NotFound: this tenant holds no such lease, or no longer does.
            ServiceError: the service refused the request, or can't be reached.
        """
        answer: ReleaseResponse = self._ask(self._prefill.Release, ReleaseRequest(lease_id=lease_id, tenant=tenant))
        return answer

    def renew(self, lease_id: str, *, tenant: str = "") -> RenewResponse:
        """Keep a lease for its whole time, `engine.held_lease_ttl_s` of the server, from now on.

        Takes and raises the same as `release`.

        Returns:
            `lease_expires_at`: when it ends, unless it is renewed again.
        """
        answer: RenewResponse = self._ask(self._prefill.Renew, RenewRequest(lease_id=lease_id, tenant=tenant))
        return answer

    def fetch_kv(
        self,
        lease_id: str,
        *,
        tenant: str = "",
        epoch: int = 0,
        first_block: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
        stores: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> Iterator[FetchKVResponse]:
        """Read the K/V of a lease; see `FetchKVResponse` for what comes. The service sends as fast as it is read.

        Args:
            lease_id, tenant, epoch: of the answer that handed it out; an epoch of 0 is any.
            first_block: begin with this block.
            first_layer, num_layers: send only these layers of each block; 0 layers are all from the first one on.
            stores: shared stores that the caller reads as well: what is there comes as a handle.
            timeout_s: deadline of the whole; None for that of all calls.

        Raises:
            NotFound: the lease has ended, or the service has restarted.
            InvalidArgument: the lease has no such block, or the model no such layers.
        """
        request = fetch_request(lease_id, tenant, epoch, first_block, first_layer, num_layers, stores)
        return self._stream(self._prefill.FetchKV, request, self._timeout(timeout_s))

    def _ask(self, call: Any, request: Message, metadata: Any = None, timeout_s: float | None = None) -> Any:
        raise NotImplementedError

    def _stream(self, call: Any, request: Message, timeout_s: float | None, metadata: Any = None) -> AnswerStream:
        raise NotImplementedError

    def _timeout(self, timeout_s: float | None) -> float | None:
        raise NotImplementedError


class AsyncLeaseCalls:
    """Calls of `AsyncClient` about leases; see `LeaseCalls`."""

    _prefill: PrefillServiceStub

    async def release(self, lease_id: str, *, tenant: str = "") -> ReleaseResponse:
        """Give back a held lease; see `Client.release`."""
        request = ReleaseRequest(lease_id=lease_id, tenant=tenant)
        answer: ReleaseResponse = await self._ask(self._prefill.Release, request)
        return answer

    async def renew(self, lease_id: str, *, tenant: str = "") -> RenewResponse:
        """Keep a held lease for its whole time again; see `Client.renew`."""
        request = RenewRequest(lease_id=lease_id, tenant=tenant)
        answer: RenewResponse = await self._ask(self._prefill.Renew, request)
        return answer

    def fetch_kv(
        self,
        lease_id: str,
        *,
        tenant: str = "",
        epoch: int = 0,
        first_block: int = 0,
        first_layer: int = 0,
        num_layers: int = 0,
        stores: Sequence[str] = (),
        timeout_s: float | None = None,
    ) -> AsyncGenerator[FetchKVResponse]:
        """Read the K/V of a held lease; see `Client.fetch_kv`."""
        request = fetch_request(lease_id, tenant, epoch, first_block, first_layer, num_layers, stores)
        return self._stream(self._prefill.FetchKV, request, self._timeout(timeout_s))

    async def _ask(self, call: Any, request: Message, metadata: Any = None, timeout_s: float | None = None) -> Any:
        raise NotImplementedError

    def _stream(self, call: Any, request: Message, timeout_s: float | None, metadata: Any = None) -> AsyncAnswerStream:
        raise NotImplementedError

    def _timeout(self, timeout_s: float | None) -> float | None:
        raise NotImplementedError


def fetch_request(
    lease_id: str,
    tenant: str,
    epoch: int,
    first_block: int,
    first_layer: int = 0,
    num_layers: int = 0,
    stores: Sequence[str] = (),
) -> FetchKVRequest:
    """Make the message of `fetch_kv`."""
    return FetchKVRequest(
        lease_id=lease_id,
        tenant=tenant,
        epoch=epoch,
        first_block=first_block,
        first_layer=first_layer,
        num_layers=num_layers,
        stores=stores,
    )
