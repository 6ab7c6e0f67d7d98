"""Receives the request of each call and accounts for what the call holds until it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from radixkv.api.limits import Limits
from radixkv.config import ServerConfig
from radixkv.errors import DeadlinePassed, Draining, InvalidRequest
from radixkv.service.server.auth.authorizer import Authorization
from radixkv.service.server.calls import Context, current_call
from radixkv.service.server.receive.fair_shares import FairShares, QuotaKey
from radixkv.service.server.receive.grpc_options import WINDOW_BYTES, max_message_bytes
from radixkv.service.server.receive.parsing import PIECE_BYTES, parse_in_pieces
from radixkv.service.server.receive.receive_slots import ReceiveSlots
from radixkv.service.server.receive.response_bytes import response_bytes
from radixkv.service.server.receive.unsent_responses import UnsentResponses
from radixkv.service.server.thread_call import call_on_thread

_MIN_SLOTS = 4  # messages that are received at once, even if together they may exceed `max_receiving_bytes`
_MAX_WAITING_CALLS = 1024  # that wait for a slot, in each class of slots
# Large messages that are parsed at the same time; each occupies a thread.
_MAX_PARSING = 2
# Health watches may use this share of `max_calls`, and event streams and reflection together as much again. The limits
# are separate, because watches need no credentials and must not keep routers from their events.
_ENDLESS_SHARE = 1 / 8
# Maximum size of a request that carries no prompt; names have at most 256 characters.
_MAX_SMALL_BYTES = 4096
# Orchestrators check health until the server has stopped.
_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_DRAIN_POLL_S = 0.005  # between two checks whether all calls have ended

Parse = Callable[[bytes], Any]


class InFlightCall:
    """One call in flight. Until it ends, the call and the bytes of its request and unsent responses count as in use.

    Attributes:
        context: the context of the call: that of gRPC, or an `HttpCall`.
        peer: name of the connection, as the context returns it.
        authorization: the caller and its permission.
        is_endless: whether the call is a health watch, an event stream or reflection, for which a drain does not wait.
    """

    __slots__ = (
        "_caller",
        "_calls",
        "_num_held_bytes",
        "_num_reserved_bytes",
        "_owner",
        "_receiver",
        "authorization",
        "context",
        "is_endless",
        "peer",
    )

    def __init__(
        self, receiver: Receiver, context: Context, authorization: Authorization, calls: FairShares, is_endless: bool
    ) -> None:
        self.context = context
        self.peer = context.peer()
        self.authorization = authorization
        self.is_endless = is_endless
        self._receiver = receiver
        self._calls = calls
        self._caller = QuotaKey.of_caller(authorization.identity, self.peer)
        self._owner = self._caller  # the quota key that the held bytes are charged to
        self._num_held_bytes = 0
        self._num_reserved_bytes = 0
        calls.take(self._caller, 1)
        current_call().add_done_callback(self._end)

    def hold_unparsed(self, num_bytes: int) -> None:
        """Charge a request whose tenant is not known yet to the caller, until `hold_request` replaces the charge.

        Raises:
            QueueFull: too many bytes are held for this caller.
        """
        self._charge(self._caller, num_bytes)

    def hold_request(self, tenant: str | None, num_bytes: int, reserved_bytes: int) -> None:
        """Charge the request, and the memory that its response will need, to the tenant, or else to the caller.

        Raises:
            QueueFull: too many bytes are held for this tenant or caller.
        """
        self._charge(self._caller if tenant is None else QuotaKey.of_tenant(tenant), num_bytes + reserved_bytes)
        self._num_reserved_bytes = reserved_bytes

    def hold_response(self, num_bytes: int) -> None:
        """Charge the bytes of a serialized response that exceed those reserved for it. Raises as `hold_request`."""
        if num_bytes > self._num_reserved_bytes:
            self._hold(num_bytes - self._num_reserved_bytes)

    def _charge(self, owner: QuotaKey, num_bytes: int) -> None:
        """Charge bytes to a quota key, in place of those that were charged before."""
        self._release()
        self._owner = owner
        self._hold(num_bytes)

    def _release(self) -> None:
        if self._num_held_bytes:
            self._receiver.held_bytes.release(self._owner, self._num_held_bytes)
            self._num_held_bytes = 0

    def _hold(self, num_bytes: int) -> None:
        self._receiver.held_bytes.take(self._owner, num_bytes)
        self._num_held_bytes += num_bytes

    def _end(self, _: object) -> None:
        self._calls.release(self._caller, 1)
        self._release()
        self._receiver.forget(self)


class Receiver:
    """Bounds the memory and the time that calls can take from the server.

        call ─▶ counted ─▶ slot ─▶ received ─▶ parsed ─▶ held until the call ends ─▶ response unsent ─▶ sent
             (FairShares)  (ReceiveSlots)  (large: in pieces, on a thread)  (FairShares)  (UnsentResponses)

    Args:
        config: the limits.
        limits: the longest prompt, which determines the largest message.

    Attributes:
        held_bytes: counts the bytes of requests and unsent responses.
        in_flight: the calls whose request has arrived, and whose response is not completely written yet, except for
            endless calls.
    """

    def __init__(self, config: ServerConfig, limits: Limits) -> None:
        num_slots = max(_MIN_SLOTS, config.max_receiving_bytes // max_message_bytes(config, limits))
        max_endless = max(1, int(_ENDLESS_SHARE * config.max_calls))
        self.held_bytes = FairShares(config.max_held_bytes, "bytes of requests and unsent responses")
        self.in_flight: set[object] = set()
        self._slots = ReceiveSlots(num_slots, _MAX_WAITING_CALLS, config.receive_timeout_s)
        self._parse_slots = asyncio.Semaphore(_MAX_PARSING)
        self._calls = FairShares(config.max_calls, "calls in flight")
        self._watches = FairShares(max_endless, "health watches")
        self._endless = FairShares(max_endless, "endless streams")
        self._timeout_s = config.receive_timeout_s
        self._unsent = UnsentResponses(config.send_timeout_s)
        self._vocab_size = limits.vocab_size
        self._is_draining = False

    @property
    def num_calls(self) -> int:
        """Number of calls in flight, including those whose request has not arrived; endless calls are not counted."""
        return self._calls.used

    @property
    def num_endless(self) -> int:
        """Number of event streams and reflection streams in flight."""
        return self._endless.used

    def refuse_new(self) -> None:
        """From now on refuse new calls, and calls whose request has not arrived. Health checks are still answered."""
        self._is_draining = True

    async def wait_for_calls(self, timeout_s: float) -> bool:
        """Wait for the calls that are in flight now, at most `timeout_s` seconds. Later calls are not waited for.

        Returns:
            Whether they have all ended.
        """
        awaited_calls = self.in_flight.copy()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        while self.in_flight & awaited_calls and loop.time() < end_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        return not self.in_flight & awaited_calls

    def begin(self, context: Context, authorization: Authorization, *, is_endless: bool = False) -> InFlightCall:
        """Count a call until it ends.

        Raises:
            Draining: the server takes no new calls.
            QueueFull: too many calls are in flight, and this caller has used its share of them, or twice the limit are
                in flight.
        """
        method = authorization.method
        self._require_accepting(method)
        if not is_endless:
            calls = self._calls
        elif method.startswith(_HEALTH_PREFIX):
            calls = self._watches
        else:
            calls = self._endless
        return InFlightCall(self, context, authorization, calls, is_endless)

    async def receive(self, call: InFlightCall, parse: Parse) -> Any:
        """Receive and parse the request of a call.

        Args:
            call: returned by `begin`.
            parse: the class method `FromString` of the request's class.

        Returns:
            The request, with the caller's own tenant if it names none.

        Raises:
            Draining: the server takes no new calls.
            InvalidRequest: there is no message, it cannot be parsed, or it is large although it carries no prompt.
            NotPermitted: the caller may not act for the tenant that the request names.
            QueueFull: too many calls wait, the request arrived slowly while others waited, or too much is held for its
                caller or tenant.
            DeadlinePassed: the request did not arrive within `server.receive_timeout_s`.
        """
        data = await self.receive_bytes(call)
        request = await self._parse(parse, data)
        self.hold(call, request, len(data))
        return request

    async def receive_bytes(self, call: InFlightCall, declared_bytes: int | None = None) -> bytes:
        """Receive the request of a call without parsing it. Raises as `receive`, apart from NotPermitted.

        A request that is larger than a flow-control window is charged to the caller until `hold` charges its owner.

        Args:
            call: returned by `begin`.
            declared_bytes: size of the request, if it is known. A request that is no larger than a flow-control window
                needs no slot, because every connection may buffer that much. So it never waits for slow senders.
        """
        if declared_bytes is not None and declared_bytes <= WINDOW_BYTES:
            data = await self._read_in_time(call)
        else:
            data = await self._slots.receive(call.peer, call.context.read)
        authorization = call.authorization
        self._require_accepting(authorization.method)  # a drain waits for requests that have arrived, and no others
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in its stubs
            raise InvalidRequest("request: the call has no message")
        if not authorization.rule.has_prompts:
            _require_small(data)
        if len(data) > WINDOW_BYTES:
            call.hold_unparsed(len(data))
        if not call.is_endless:
            self.in_flight.add(call)
        return data

    async def _read_in_time(self, call: InFlightCall) -> bytes:
        try:
            async with asyncio.timeout(self._timeout_s):
                data: bytes = await call.context.read()
                return data
        except TimeoutError as error:
            raise DeadlinePassed(
                f"message: only a part of it arrived within {self._timeout_s:g} s (`server.receive_timeout_s`)"
            ) from error

    def hold(self, call: InFlightCall, request: Any, num_bytes: int) -> None:
        """Bind the tenant of a request, and charge the request to it until the call ends.

        Args:
            call: returned by `begin`.
            request: the message, which gets the caller's own tenant if it names none.
            num_bytes: bytes that the request takes.

        Raises:
            NotPermitted: the caller may not act for the tenant that the request names.
            QueueFull: too much is held for the tenant, or for the caller if the request belongs to no single tenant.
        """
        tenant = call.authorization.bind_tenant(request)
        call.hold_request(tenant, num_bytes, response_bytes(request, self._vocab_size))

    async def receive_all(self, call: InFlightCall, parse: Parse) -> AsyncGenerator[Any, None]:
        """Receive and parse small messages until the caller ends its stream. One timeout applies to all of them.

        Raises:
            InvalidRequest: a message cannot be parsed, or is large.
            DeadlinePassed: the caller did not finish in time.
        """
        end_s = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    data = await call.context.read()
            except TimeoutError as error:
                raise DeadlinePassed(
                    f"messages: the stream did not end within {self._timeout_s:g} s (`server.receive_timeout_s`)"
                ) from error
            if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in its stubs
                return
            _require_small(data)
            yield await self._parse(parse, data)

    def note_response(self, call: InFlightCall, response: bytes) -> bytes:
        """Account for a serialized response that is passed to gRPC, and return it.

        Raises:
            QueueFull: too many bytes are held for the tenant, or for the caller if the request belongs to no tenant.
        """
        call.hold_response(len(response))
        self._unsent.add(call.context)
        return response

    async def note_responses(
        self, call: InFlightCall, responses: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[Any, None]:
        """Yield the messages of a streamed response. Each counts as unsent until gRPC asks for the next one."""
        async with contextlib.aclosing(responses):
            async for response in responses:
                self._unsent.add(call.context)
                try:
                    yield response
                finally:
                    self._unsent.discard(call.context)

    def forget(self, call: InFlightCall) -> None:
        """Remove a call that has ended."""
        self.in_flight.discard(call)
        self._unsent.discard(call.context)

    def _require_accepting(self, method: str) -> None:
        if self._is_draining and not method.startswith(_HEALTH_PREFIX):
            raise Draining("service: shutting down, no new requests")

    async def _parse(self, parse: Parse, data: bytes) -> Any:
        try:
            if len(data) <= PIECE_BYTES:
                return parse(data)
            await self._parse_slots.acquire()
            return await call_on_thread(partial(parse_in_pieces, parse(b""), data), self._parse_slots.release)
        except DecodeError as error:
            raise InvalidRequest(f"request: expected a protobuf message, got {len(data)} other bytes") from error


def _require_small(data: bytes) -> None:
    if len(data) > _MAX_SMALL_BYTES:
        raise InvalidRequest(f"request: expected at most {_MAX_SMALL_BYTES} bytes without a prompt, got {len(data)}")
