"""Fetches the K/V of a prompt from the server that computed it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import grpc
import grpc.aio

from radixkv.api.params import PrefillParams
from radixkv.errors import (
    Cause,
    InvalidRequest,
    KVFormatDiffers,
    KVOfOtherPrompt,
    KVSourceError,
    KVSourceUnusable,
    SwitchedOff,
    UnknownLease,
)
from radixkv.offload.index.prompt_blocks import FetchedBlocks, KeyedBlock
from radixkv.offload.tiers.block_mac import BlockMac
from radixkv.offload.tiers.block_object import ObjectFault
from radixkv.service.client.async_client import AsyncClient
from radixkv.service.server.auth.authenticator import has_token
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.receive.fair_shares import FairShares, QuotaKey
from radixkv.service.server.servicers.engine_calls import result_of
from radixkv.service.server.servicers.kv_sources import KVSources
from radixkv.v1 import prefill_pb2

if TYPE_CHECKING:  # the engine needs torch; these modules do not
    from radixkv.engine.engine import Engine
    from radixkv.engine.transfer.transfer import FleetAccess, Transfer

_OTHER_PROMPT_FAULTS = (ObjectFault.FOREIGN, ObjectFault.OTHER_TOKENS)
# A stream that breaks off is resumed, up to this number of attempts.
_MAX_ATTEMPTS = 3
# Fetching stops if the source sends no whole block for _MAX_BLOCK_S, or if all blocks take longer than _MAX_FETCH_S.
# The missing blocks are computed.
_MAX_BLOCK_S = 10.0
_MAX_FETCH_S = 60.0
# Errors of the other server that a retry does not fix: the request is invalid, or this server cannot use the other one.
_INVALID_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE)
_UNUSABLE_CODES = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
# Errors after which the stream is resumed.
_RETRIED_CODES = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
)


_logger = logging.getLogger(__name__)


class KVFetcher:
    """Fetches the blocks that are not cached here, and verifies that each belongs to the tokens of the prompt.

    The bytes of fetched K/V are limited by `transfer.max_fetching_bytes`. No call waits for this memory, because it is
    held by requests that wait for the device: blocks that exceed the limit are computed instead. A single tenant can
    use half of the limit; the other half is left for tenants below an equal share.

    Args:
        engine: knows the blocks of a prompt, and which of them are cached.
        mailbox: delivers the engine's results.

    Raises:
        ConfigError: a section `kv_sources` cannot be used.
    """

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        self._engine = engine
        self._mailbox = mailbox
        transfer = engine.transfer
        self._sources = KVSources({} if transfer is None else transfer.sources)
        max_bytes = 0 if transfer is None else transfer.config.max_fetching_bytes
        self._held_bytes = FairShares(max_bytes // 2, "bytes of fetched K/V")

    async def fetch(
        self, params: PrefillParams, source: prefill_pb2.KVSource, authorization: str = ""
    ) -> FetchedBlocks | None:
        """Fetch K/V of a prompt, within the limit on memory.

        Args:
            params: the prompt.
            source: the server and lease that have its K/V.
            authorization: the header `authorization` of the call. Calls of this server's fleet may name any source.

        Returns:
            The blocks, from the first missing one on; None if there is no memory for any, nothing is missing here, or
            the first missing block did not arrive in time or intact.

        Raises:
            SwitchedOff: this server does not fetch K/V, or the source does not send any.
            InvalidRequest: no section `kv_sources` has this address, the request disables the cache, or the source
                refuses it as invalid.
            UnknownLease: the lease is no longer held by the source, or the source was restarted.
            UnknownAdapter: no adapter has the caller's name for it.
            KVOfOtherPrompt: the lease is of another prompt.
            KVFormatDiffers: the source has another model, other dtypes, or another block size.
            KVSourceUnusable: the source refuses this server's credentials, or the certificates cannot be used.
            KVSourceError: the source cannot be reached, or sends other blocks than were requested.
        """
        transfer = self._engine.transfer
        if transfer is None:
            raise SwitchedOff("kv_source: this server fetches no K/V; add a section kv_sources to its configuration")
        if not params.read_cache:
            raise InvalidRequest("kv_source: can't be combined with read_cache=false")
        client = self._sources.client_of(source.address, _fleet(transfer, authorization))
        prompt_blocks = transfer.wanted(params.tokens, params.caller)
        probe_result = await result_of(self._engine, self._mailbox, self._engine.probe(params.tokens, params.caller))
        first_block = probe_result.cached_tokens // transfer.block_format.block_size
        block_bytes = transfer.block_format.payload_bytes
        quota_key = QuotaKey.of_tenant(params.caller.tenant)
        missing_blocks = prompt_blocks[first_block : first_block + self._held_bytes.available(quota_key) // block_bytes]
        if not missing_blocks:
            return None
        self._held_bytes.take(quota_key, len(missing_blocks) * block_bytes)
        try:
            stores = await result_of(
                self._engine, self._mailbox, transfer.stores_for(missing_blocks, params.caller.tenant)
            )
            mac = transfer.mac_of(is_member=not self._sources.has_section(source.address))
            stream = _BlockStream(transfer, client, params, source, first_block, missing_blocks, mac)
            payloads = await stream.fetch_payloads(stores)
        except BaseException:
            self._held_bytes.release(quota_key, len(missing_blocks) * block_bytes)
            raise
        self._held_bytes.release(quota_key, (len(missing_blocks) - len(payloads)) * block_bytes)
        if not payloads:
            return None
        fetched = FetchedBlocks(first_block, missing_blocks[: len(payloads)], payloads)
        # The engine's thread frees the blocks, after copying them or when the request ends.
        weakref.finalize(fetched, self._mailbox.post, self._held_bytes.release, quota_key, len(payloads) * block_bytes)
        return fetched


def _fleet(transfer: Transfer, authorization: str) -> FleetAccess | None:
    """Return this server's fleet if the call has the fleet's token; otherwise None."""
    fleet = transfer.fleet
    return fleet if fleet is not None and has_token(authorization, fleet.token) else None


class _HandleInStore(NamedTuple):
    """Stands for a block whose handle was received, and that is to be loaded from the shared store of this name."""

    store: str


class _BlockStream:
    """Receives the blocks of one prompt."""

    def __init__(
        self,
        transfer: Transfer,
        client: AsyncClient,
        params: PrefillParams,
        source: prefill_pb2.KVSource,
        first_block: int,
        wanted: list[KeyedBlock],
        mac: BlockMac | None,
    ) -> None:
        self._transfer = transfer
        self._client = client
        self._params = params
        self._source = source
        self._first_block = first_block
        self._wanted = wanted
        self._mac = mac
        # By index: a block, a block that is being verified, a fault, or a handle; None if nothing was received.
        self._payloads: list[
            asyncio.Future[memoryview | ObjectFault] | memoryview | ObjectFault | _HandleInStore | None
        ]
        self._payloads = [None] * len(wanted)
        self._end_s = asyncio.get_running_loop().time() + _MAX_FETCH_S

    async def fetch_payloads(self, stores: Sequence[str]) -> list[memoryview]:
        """Return K and V of the wanted blocks, up to the first that is not available, is late or fails verification.

        Args:
            stores: shared stores whose handles the source may send instead of blocks. A block that cannot be loaded
                from its store is fetched from the source.

        Raises:
            KVOfOtherPrompt: the first block, and so the lease, is of another prompt; or a handle is not of the block
                that was expected.
        """
        is_late = await self._fetch_in_time([(0, len(self._wanted))], stores)
        await asyncio.gather(*(self._load(store) for store in stores))
        if not is_late:
            is_late = await self._fetch_in_time(self._runs_to_fetch(), ())
        if is_late:
            _logger.warning(
                "kv_source %s: did not send a block in time; missing blocks are computed", self._source.address
            )
        return await self._await_verified()

    async def _await_verified(self) -> list[memoryview]:
        verified: list[memoryview] = []
        for each in self._payloads:
            payload = await each if isinstance(each, asyncio.Future) else each
            if isinstance(payload, ObjectFault):
                self._transfer.rejected.add([payload])
                if payload in _OTHER_PROMPT_FAULTS and not verified:
                    raise KVOfOtherPrompt(f"kv_source: the lease is of another prompt ({payload.value})")
            if not isinstance(payload, memoryview):
                break
            verified.append(payload)
        return verified

    async def _fetch_in_time(self, runs: Sequence[tuple[int, int]], stores: Sequence[str]) -> bool:
        """Fetch runs of blocks. Returns whether a block was late; the blocks after it are then not fetched."""
        try:
            for start, end in runs:
                await self._fetch_run(start, end, stores)
        except TimeoutError:
            return True
        return False

    async def _fetch_run(self, start: int, end: int, stores: Sequence[str]) -> None:
        """Fetch the blocks `[start, end)`. A stream that breaks off is resumed."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            first_index = start
            try:
                async with contextlib.aclosing(self._receive(first_index, end, stores)) as received:
                    async for start in received:  # `start` advances, so that the next attempt continues there
                        if start == end:
                            break
            except grpc.aio.AioRpcError as error:
                if error.code() not in _RETRIED_CODES or (attempt == _MAX_ATTEMPTS and start == first_index):
                    raise _error_of(error) from error
            else:
                return
        raise KVSourceError(f"kv_source: the stream of K/V broke off in each of {_MAX_ATTEMPTS} attempts")

    async def _receive(self, index: int, end: int, stores: Sequence[str]) -> AsyncGenerator[int]:
        """Read one stream of blocks. After each block, yields the index of the next one.

        Raises:
            TimeoutError: a block takes too long, or all of them together.
            KVSourceError, KVFormatDiffers, KVOfOtherPrompt: the source sent something else than expected.
        """
        deadline_s = self._params.deadline_s
        responses = self._client.fetch_kv(
            self._source.lease_id,
            tenant=self._params.caller.tenant,
            epoch=self._source.epoch,
            first_block=self._first_block + index,
            stores=stores,
            timeout_s=None if deadline_s is None else max(1e-3, deadline_s - time.monotonic()),
        )
        block_data = bytearray()
        loop = asyncio.get_running_loop()
        block_end_s = loop.time() + _MAX_BLOCK_S
        try:
            while (response := await self._next(responses, block_end_s)) is not None:
                if response.HasField("format"):
                    self._require_format(response.format)
                has_handle = response.HasField("handle")
                if not (response.data or has_handle):
                    continue
                expected = self._first_block + index
                if block_data and response.block == expected + 1:
                    break
                if response.block != expected:
                    raise KVSourceError(f"kv_source: expected block {expected}, got {response.block}")
                if has_handle:
                    self._payloads[index] = self._read_handle(response.handle, self._wanted[index], stores)
                else:
                    block_data += response.data
                    if len(block_data) < self._transfer.object_bytes:
                        continue
                    self._payloads[index] = self._begin_to_verify(bytes(block_data), self._wanted[index])
                    block_data.clear()
                index += 1
                block_end_s = loop.time() + _MAX_BLOCK_S
                yield index
            if block_data:  # the stream ended, or continued with the next block, in the middle of a block
                self._payloads[index] = ObjectFault.CUT
        finally:
            await responses.aclose()

    async def _next(
        self, responses: AsyncGenerator[prefill_pb2.FetchKVResponse], block_end_s: float
    ) -> prefill_pb2.FetchKVResponse | None:
        """Return the next response; None after the last one. Raises TimeoutError if the response is late."""
        async with asyncio.timeout_at(min(block_end_s, self._end_s)):
            return await anext(responses, None)

    async def _load(self, store: str) -> None:
        """Load the blocks of which the source sent handles in a store. Missing and invalid blocks keep their handle."""
        indices = [index for index, each in enumerate(self._payloads) if each == _HandleInStore(store)]
        if not indices:
            return
        blocks = [self._wanted[index] for index in indices]
        loaded_blocks = await asyncio.wrap_future(self._transfer.stores.load(store, blocks))
        for index, block in zip(indices, loaded_blocks, strict=True):
            payload = self._transfer.stores.copy_of(block)
            if payload is not None:
                self._payloads[index] = payload

    def _runs_to_fetch(self) -> list[tuple[int, int]]:
        """Return the runs of blocks that could not be loaded from their store, as half-open ranges."""
        runs: list[tuple[int, int]] = []
        for index, each in enumerate(self._payloads):
            if isinstance(each, _HandleInStore):
                start = runs.pop()[0] if runs and runs[-1][1] == index else index
                runs.append((start, index + 1))
        return runs

    def _begin_to_verify(self, block_data: bytes, wanted: KeyedBlock) -> asyncio.Future[memoryview | ObjectFault]:
        """Verify a block on another thread, while the event loop receives the next block."""
        verify = functools.partial(self._transfer.payload_of, block_data, wanted, self._mac)
        return asyncio.get_running_loop().run_in_executor(None, verify)

    def _read_handle(self, handle: prefill_pb2.KVHandle, wanted: KeyedBlock, stores: Sequence[str]) -> _HandleInStore:
        if handle.store not in stores or handle.key != wanted.key:
            raise KVOfOtherPrompt("kv_source: the source sent a handle of a block that is not of this prompt")
        return _HandleInStore(handle.store)

    def _require_format(self, theirs: prefill_pb2.KVFormat) -> None:
        ours = self._transfer.block_format
        if theirs.fingerprint == ours.fingerprint:
            return
        for name, our_value, their_value in (
            ("model_fingerprint", ours.model, theirs.model_fingerprint),
            ("dtype", ours.dtype, theirs.dtype),
            ("kv_dtype", ours.kv_dtype, theirs.kv_dtype),
            ("layout", ours.layout, theirs.layout),
            ("block_size", ours.block_size, theirs.block_size),
        ):
            if our_value != their_value:
                raise KVFormatDiffers(f"kv_source: expected K/V with the {name} {our_value}, got {their_value}")
        raise KVFormatDiffers("kv_source: the results of the source are not bitwise identical to those of this server")


def _error_of(error: grpc.aio.AioRpcError) -> Exception:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.NOT_FOUND:
        return UnknownLease(f"kv_source: {details}", cause=Cause.KV_SOURCE)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return SwitchedOff(f"kv_source: {details}", cause=Cause.KV_SOURCE)
    if code in _INVALID_CODES:
        return InvalidRequest(f"kv_source: {details}", cause=Cause.KV_SOURCE)
    error_class = KVSourceUnusable if code in _UNUSABLE_CODES else KVSourceError
    return error_class(f"kv_source: FetchKV failed on the source with {code.name}: {details}")
