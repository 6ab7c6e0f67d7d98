"""Callers of the service: `Client` blocks, `AsyncClient` is awaited. Neither needs torch.

Both return the protobuf answers and let `grpc.RpcError` through:

    with Client("127.0.0.1:50051") as client:
        answer = client.prefill([1, 2, 3], tenant="acme")
        print(answer.usage.cached_tokens, answer.next_token_id)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from radixkv.api.retention import Retention
from radixkv.service.client.requests import (
    generate_request,
    prefill_request,
    probe_request,
    purge_request,
    retain_request,
)
from radixkv.v1.cache_pb2 import PurgeResponse, RetainResponse, StatsRequest, StatsResponse
from radixkv.v1.cache_pb2_grpc import CacheServiceStub
from radixkv.v1.prefill_pb2 import (
    GenerateResponse,
    PrefillResponse,
    ProbeResponse,
    ReleaseRequest,
    ReleaseResponse,
)
from radixkv.v1.prefill_pb2_grpc import PrefillServiceStub

Options = Sequence[tuple[str, Any]]

_MAX_TIMEOUT_S = 366 * 24 * 3600  # gRPC's own clock overflows far beyond it

# gRPC's own default refuses messages above 4 MiB: a million token ids, or the logits of a large batch of callers.
_UNLIMITED: Options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


class Client:
    """Blocking calls over one connection. Safe to share between threads."""

    def __init__(self, address: str, *, timeout_s: float | None = None, options: Options = ()) -> None:
        """Connect lazily; nothing is sent before the first call.

        Args:
            address: `HOST:PORT`.
            timeout_s: deadline of every call that gives none of its own; None waits for ever.
            options: further gRPC channel options; they win over ours.

        Raises:
            ValueError: the address has no port from 1 to 65535, or `timeout_s` is not a positive number.
        """
        self._timeout_s = _positive(timeout_s)
        self._channel = grpc.insecure_channel(_target(address), options=_merged(options))
        self._prefill, self._cache = _stubs(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and cancel calls in flight. Closing again does nothing."""
        self._channel.close()

    def prefill(
        self,
        token_ids: npt.ArrayLike,
        *,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        request_id: str = "",
        read_cache: bool = True,
        write_cache: bool = True,
        retention: Retention | None = None,
        top_logprobs: int = 0,
        return_logits: bool = False,
        hold_lease: bool = False,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> PrefillResponse:
        """Prefill one prompt, reusing what is cached.

        Args:
            token_ids: the prompt; a sequence of ints, an integer numpy array, an `array.array` or a torch tensor.
            tenant, adapter, salt: identity; only requests with equal ones share cached tokens.
            request_id: echoed; made by the server when empty.
            read_cache: reuse cached tokens.
            write_cache: publish the computed tokens for later requests.
            retention: keep the prompt longer than others, or less long; the answer's `retained` says what was granted.
            top_logprobs: how many most likely next tokens to report.
            return_logits: return the whole logits row; read it with `logits_of`.
            hold_lease: keep the prompt's blocks alive until `release`.
            priority: 0 to 100; before or after the tenant's own other requests. Without it, 50.
            timeout_s: deadline of this call.

        Raises:
            TypeError, ValueError: `token_ids` is no run of uint32 numbers, or another argument has a wrong type or does
                not fit; nothing was sent.
            grpc.RpcError: the service refused, or can't be reached.
        """
        request = prefill_request(
            token_ids,
            tenant=tenant,
            adapter=adapter,
            salt=salt,
            request_id=request_id,
            read_cache=read_cache,
            write_cache=write_cache,
            retention=retention,
            priority=priority,
            top_logprobs=top_logprobs,
            return_logits=return_logits,
            hold_lease=hold_lease,
        )
        answer: PrefillResponse = self._prefill.Prefill(request, timeout=self._timeout(timeout_s))
        return answer

    def generate(
        self,
        token_ids: npt.ArrayLike,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        request_id: str = "",
        read_cache: bool = True,
        write_cache: bool = True,
        retention: Retention | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[GenerateResponse]:
        """Go on with a prompt, token by token. What is generated is cached for the next turn.

        Args:
            token_ids: the prompt; see `prefill`, also for the arguments that are not listed here.
            max_new_tokens: at least 1; without it, 16.
            temperature: what logits are divided by; 0 takes the most likely token.
            top_p: draw from the fewest tokens that have so much probability together; without it, from all.
            seed: the same one draws the same tokens; without it, a random one.
            stop_token_ids: each of them ends the generation, as its last token.
            ignore_eos: go on after the model's own end-of-sequence tokens.
            timeout_s: deadline of the whole call.

        Yields:
            New tokens as they come. The first answer has the usage of the prompt; the last one is `finished` and says
            why. Closing the iterator cancels the request.

        Raises:
            TypeError, ValueError: as `prefill`; nothing was sent.
            grpc.RpcError: the service refused, or can't be reached; also while tokens are read.
        """
        prompt = prefill_request(
            token_ids,
            tenant=tenant,
            adapter=adapter,
            salt=salt,
            request_id=request_id,
            read_cache=read_cache,
            write_cache=write_cache,
            retention=retention,
            priority=priority,
        )
        request = generate_request(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        )
        return _closing(self._prefill.Generate(request, timeout=self._timeout(timeout_s)))

    def probe(self, token_ids: npt.ArrayLike, *, tenant: str = "", adapter: str = "", salt: str = "") -> ProbeResponse:
        """Ask how many tokens a prefill of this prompt would reuse now. Changes nothing. Raises like `prefill`."""
        request = probe_request(token_ids, tenant=tenant, adapter=adapter, salt=salt)
        answer: ProbeResponse = self._prefill.Probe(request, timeout=self._timeout_s)
        return answer

    def release(self, lease_id: str, *, tenant: str = "") -> ReleaseResponse:
        """Give back a lease that `prefill(hold_lease=True)` handed out."""
        request = ReleaseRequest(lease_id=lease_id, tenant=tenant)
        answer: ReleaseResponse = self._prefill.Release(request, timeout=self._timeout_s)
        return answer

    def retain(
        self, token_ids: npt.ArrayLike, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> RetainResponse:
        """Give a cached range a priority, whatever it had before. Raises like `prefill`."""
        request = retain_request(token_ids, retention, tenant=tenant, adapter=adapter, salt=salt)
        answer: RetainResponse = self._cache.Retain(request, timeout=self._timeout_s)
        return answer

    def purge(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        salt: str | None = None,
        everything: bool = False,
    ) -> PurgeResponse:
        """Forget all namespaces with these names; None is any name.

        Raises:
            ValueError: no name at all, and not `everything`; or both.
            grpc.RpcError: the service refused, or can't be reached.
        """
        request = purge_request(tenant, adapter, salt, everything=everything)
        answer: PurgeResponse = self._cache.Purge(request, timeout=self._timeout_s)
        return answer

    def stats(self) -> StatsResponse:
        """What the cache holds and what it did."""
        answer: StatsResponse = self._cache.Stats(StatsRequest(), timeout=self._timeout_s)
        return answer

    def _timeout(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else _positive(timeout_s)


class AsyncClient:
    """Awaited calls over one connection. Make it inside the event loop that uses it."""

    def __init__(self, address: str, *, timeout_s: float | None = None, options: Options = ()) -> None:
        """Connect lazily; see `Client`."""
        self._timeout_s = _positive(timeout_s)
        self._channel = grpc.aio.insecure_channel(_target(address), options=_merged(options))
        self._prefill, self._cache = _stubs(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and cancel calls in flight. Closing again does nothing."""
        await self._channel.close(None)

    async def prefill(
        self,
        token_ids: npt.ArrayLike,
        *,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        request_id: str = "",
        read_cache: bool = True,
        write_cache: bool = True,
        retention: Retention | None = None,
        top_logprobs: int = 0,
        return_logits: bool = False,
        hold_lease: bool = False,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> PrefillResponse:
        """Prefill one prompt; see `Client.prefill`. Cancelling the awaiting task cancels the request."""
        request = prefill_request(
            token_ids,
            tenant=tenant,
            adapter=adapter,
            salt=salt,
            request_id=request_id,
            read_cache=read_cache,
            write_cache=write_cache,
            retention=retention,
            priority=priority,
            top_logprobs=top_logprobs,
            return_logits=return_logits,
            hold_lease=hold_lease,
        )
        timeout_s = self._timeout_s if timeout_s is None else _positive(timeout_s)
        answer: PrefillResponse = await self._prefill.Prefill(request, timeout=timeout_s)
        return answer

    def generate(
        self,
        token_ids: npt.ArrayLike,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        tenant: str = "",
        adapter: str = "",
        salt: str = "",
        request_id: str = "",
        read_cache: bool = True,
        write_cache: bool = True,
        retention: Retention | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[GenerateResponse]:
        """Go on with a prompt; see `Client.generate`. `async for` reads the answers."""
        prompt = prefill_request(
            token_ids,
            tenant=tenant,
            adapter=adapter,
            salt=salt,
            request_id=request_id,
            read_cache=read_cache,
            write_cache=write_cache,
            retention=retention,
            priority=priority,
        )
        request = generate_request(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
        )
        timeout_s = self._timeout_s if timeout_s is None else _positive(timeout_s)
        return _closing_async(self._prefill.Generate(request, timeout=timeout_s))

    async def probe(
        self, token_ids: npt.ArrayLike, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> ProbeResponse:
        """Ask how many tokens a prefill would reuse now; see `Client.probe`."""
        request = probe_request(token_ids, tenant=tenant, adapter=adapter, salt=salt)
        answer: ProbeResponse = await self._prefill.Probe(request, timeout=self._timeout_s)
        return answer

    async def release(self, lease_id: str, *, tenant: str = "") -> ReleaseResponse:
        """Give back a held lease; see `Client.release`."""
        request = ReleaseRequest(lease_id=lease_id, tenant=tenant)
        answer: ReleaseResponse = await self._prefill.Release(request, timeout=self._timeout_s)
        return answer

    async def retain(
        self, token_ids: npt.ArrayLike, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> RetainResponse:
        """Give a cached range a priority; see `Client.retain`."""
        request = retain_request(token_ids, retention, tenant=tenant, adapter=adapter, salt=salt)
        answer: RetainResponse = await self._cache.Retain(request, timeout=self._timeout_s)
        return answer

    async def purge(
        self,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        salt: str | None = None,
        everything: bool = False,
    ) -> PurgeResponse:
        """Forget namespaces; see `Client.purge`."""
        request = purge_request(tenant, adapter, salt, everything=everything)
        answer: PurgeResponse = await self._cache.Purge(request, timeout=self._timeout_s)
        return answer

    async def stats(self) -> StatsResponse:
        """What the cache holds and what it did."""
        answer: StatsResponse = await self._cache.Stats(StatsRequest(), timeout=self._timeout_s)
        return answer


def _closing(call: Any) -> Iterator[GenerateResponse]:
    try:
        yield from call
    finally:
        call.cancel()


async def _closing_async(call: Any) -> AsyncIterator[GenerateResponse]:
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()


def logits_of(response: PrefillResponse) -> npt.NDArray[np.float32]:
    """The logits row of an answer to `prefill(return_logits=True)`.

    Returns:
        float32 `[vocab_size]`, read-only, a view of the answer's bytes; empty if logits were not asked for.
    """
    return np.frombuffer(response.logits, dtype="<f4")


def _target(address: str) -> str:
    """gRPC would dial port 443 where none is given, and any port modulo 65536."""
    if not isinstance(address, str):
        raise TypeError(f"address: expected HOST:PORT, got {address!r}")
    if address.startswith(("unix:", "dns:", "ipv4:", "ipv6:", "xds:")):
        return address
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"address: expected HOST:PORT with a port from 1 to 65535, got {address!r}")
    return address


def _positive(timeout_s: float | None) -> float | None:
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < _MAX_TIMEOUT_S):
        raise ValueError(f"timeout_s: expected more than 0 and less than {_MAX_TIMEOUT_S} seconds, got {timeout_s!r}")
    return timeout_s


def _merged(options: Options) -> list[tuple[str, Any]]:
    return list({**dict(_UNLIMITED), **dict(options)}.items())  # gRPC keeps the first of two equal names


def _stubs(channel: grpc.Channel | grpc.aio.Channel) -> tuple[PrefillServiceStub, CacheServiceStub]:
    # The generated stubs serve both kinds of channel and carry no annotations.
    return PrefillServiceStub(channel), CacheServiceStub(channel)  # type: ignore[no-untyped-call]
