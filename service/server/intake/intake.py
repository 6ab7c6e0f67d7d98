"""Receives the message of a call, and hands its answer over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from radixkv.api.limits import Limits
from radixkv.config import ServerConfig
from radixkv.errors import InvalidRequest
from radixkv.service.server.identity.gate import Admission
from radixkv.service.server.intake.answer_bytes import answer_bytes
from radixkv.service.server.intake.bounds import largest_message_bytes
from radixkv.service.server.intake.held_bytes import HeldBytes
from radixkv.service.server.intake.parsing import PIECE_BYTES, parse_in_pieces
from radixkv.service.server.intake.places import Places
from radixkv.service.server.intake.unsent import UnsentAnswers
from radixkv.service.server.unfinished_calls import Context, UnfinishedCalls, when_over

_LEAST_PLACES = 4
_MOST_WAITING = 1024
# Large messages that are parsed at the same time; each takes a thread.
_MOST_PARSED = 2

Parse = Callable[[bytes], Any]


class Intake:
    """Bounds what callers can make the server hold, and for how long.

        message ─▶ place ─▶ received ─▶ parsed ─▶ held until the call is over ─▶ answer unsent ─▶ sent
                   (Places)             (large: in pieces, on a thread)         (HeldBytes)      (UnsentAnswers)

    Args:
        config: the bounds.
        limits: the longest prompt.
        unfinished: notes each call from its message on until it ends.
    """

    def __init__(self, config: ServerConfig, limits: Limits, unfinished: UnfinishedCalls) -> None:
        num_places = max(_LEAST_PLACES, config.max_receiving_bytes // largest_message_bytes(config, limits))
        self._places = Places(num_places, _MOST_WAITING, config.receive_timeout_s)
        self._parsing = asyncio.Semaphore(_MOST_PARSED)
        self._held = HeldBytes(config.max_held_bytes)
        self._unsent = UnsentAnswers(config.send_timeout_s)
        self._unfinished = unfinished
        self._vocab_size = limits.vocab_size

    async def receive(self, parse: Parse, context: Context, admission: Admission, *, is_endless: bool = False) -> Any:
        """Receive the message of a call and parse it.

        Args:
            parse: the class method `FromString` of the message's class.
            context: of the call.
            admission: looks at the tenant of the message, and writes the caller's own where none is named.
            is_endless: whether the call ends with the service and not before, so that nobody waits for its end.

        Raises:
            InvalidRequest: no message came, or it can't be parsed.
            PermissionDenied: the caller may not act for its tenant.
            QueueFull, DeadlineExceeded: it had to wait, or came too slowly; or too much is held for its tenant.
        """
        data = await self._places.receive(context.peer(), context.read)
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in its stubs
            raise InvalidRequest("request: expected one message, got none")
        if not is_endless:
            self._unfinished.add(context)
        message = await self._parsed(parse, data)
        admission.place_tenant(message)
        self._hold(context, tenant_of(message), len(data) + answer_bytes(message, self._vocab_size))
        return message

    def send(self, context: Context, request: Any, answer: bytes) -> bytes:
        """Note an answer that is handed to gRPC, and return it.

        Args:
            context: of the call.
            request: its message, which `receive` returned.
            answer: to be sent.

        Raises:
            QueueFull: too many of this tenant's answers are unread.
        """
        self._hold(context, tenant_of(request), max(0, len(answer) - answer_bytes(request, self._vocab_size)))
        self._unsent.add(context)
        when_over(context, self._unsent.discard)
        return answer

    def begin_part(self, context: Context) -> None:
        """Note that a part of a streamed answer is handed to gRPC."""
        self._unsent.add(context)

    def end_part(self, context: Context) -> None:
        """Note that gRPC wants the next part, or that there is none."""
        self._unsent.discard(context)

    async def _parsed(self, parse: Parse, data: bytes) -> Any:
        try:
            if len(data) <= PIECE_BYTES:
                return parse(data)
            async with self._parsing:
                return await asyncio.to_thread(parse_in_pieces, parse(b""), data)
        except DecodeError as error:
            raise InvalidRequest(f"request: expected a protobuf message, got {len(data)} other bytes") from error

    def _hold(self, context: Context, tenant: str, num_bytes: int) -> None:
        self._held.take(tenant, num_bytes)
        when_over(context, partial(self._give_back, tenant, num_bytes))

    def _give_back(self, tenant: str, num_bytes: int, _: Context) -> None:
        self._held.give_back(tenant, num_bytes)


def tenant_of(message: Any) -> str:
    """Return the tenant that a request names; empty if it names none."""
    named = getattr(message, "tenant", None)
    if named is None:
        named = getattr(getattr(message, "prefill", None), "tenant", "")
    return str(named)
