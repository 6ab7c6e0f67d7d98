"""Receives the message of a call, and hands its answer over."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from radixkv.api.limits import Limits
from radixkv.config import ServerConfig
from radixkv.errors import DeadlineExceeded, Draining, InvalidRequest
from radixkv.service.server.identity.gate import Admission
from radixkv.service.server.intake.account import Account
from radixkv.service.server.intake.answer_bytes import answer_bytes
from radixkv.service.server.intake.bounds import largest_message_bytes
from radixkv.service.server.intake.lanes import Lanes
from radixkv.service.server.intake.parsing import PIECE_BYTES, parse_in_pieces
from radixkv.service.server.intake.shares import Shares
from radixkv.service.server.intake.unsent import UnsentAnswers
from radixkv.service.server.unfinished_calls import Context, UnfinishedCalls, when_over

_LEAST_PLACES = 4
_MOST_WAITING = 1024
# Large messages that are parsed at the same time; each takes a thread.
_MOST_PARSED = 2
# Health watches have this part of `max_calls` for themselves, and so have other streams that end with the service.
# Watches need no credentials: whoever makes many of them keeps no router from its events.
_ENDLESS_PART = 8
# Most bytes of a message that brings no prompt; names in them have 256 characters at most.
_SMALL_BYTES = 4096
# Orchestrators ask for it until the end.
_HEALTH = "/grpc.health.v1.Health/"

Parse = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a call.

    Attributes:
        message: parsed.
        account: that what the call holds is counted for.
    """

    message: Any
    account: Account


class Intake:
    """Bounds what callers can make the server hold, and for how long.

        call ─▶ counted ─▶ place ─▶ received ─▶ parsed ─▶ held until the call is over ─▶ answer unsent ─▶ sent
                (Shares)   (Lanes)              (large: in pieces, on a thread) (Shares)  (UnsentAnswers)

    Args:
        config: the bounds.
        limits: the longest prompt.
        unfinished: notes each call from its message on until it ends.

    Attributes:
        held: counts the bytes of requests and unsent answers.
    """

    def __init__(self, config: ServerConfig, limits: Limits, unfinished: UnfinishedCalls) -> None:
        num_places = max(_LEAST_PLACES, config.max_receiving_bytes // largest_message_bytes(config, limits))
        self._lanes = Lanes(num_places, _MOST_WAITING, config.receive_timeout_s)
        self._parsing = asyncio.Semaphore(_MOST_PARSED)
        self._calls = Shares(config.max_calls, "calls under way")
        self._watches = Shares(max(1, config.max_calls // _ENDLESS_PART), "health watches")
        self._endless = Shares(max(1, config.max_calls // _ENDLESS_PART), "streams without an end")
        self.held = Shares(config.max_held_bytes, "bytes of requests and unsent answers")
        self._timeout_s = config.receive_timeout_s
        self._unsent = UnsentAnswers(config.send_timeout_s)
        self._unfinished = unfinished
        self._vocab_size = limits.vocab_size
        self._is_draining = False

    def refuse_new(self) -> None:
        """Refuse from now on what begins, and calls whose message has not come yet. Health checks are answered."""
        self._is_draining = True

    def begin(self, context: Context, admission: Admission, *, is_endless: bool) -> None:
        """Count a call until it is over.

        Raises:
            Draining: no new calls are taken.
            QueueFull: too many are under way, its caller's too.
        """
        self._require_taking(admission)
        endless = self._watches if admission.method.startswith(_HEALTH) else self._endless
        self._count(endless if is_endless else self._calls, context, Account.of_caller(admission, context), 1)

    async def receive(
        self, parse: Parse, context: Context, admission: Admission, *, is_endless: bool = False
    ) -> Received:
        """Receive the message of a call and parse it.

        Args:
            parse: the class method `FromString` of the message's class.
            context: of the call.
            admission: looks at the tenant of the message, and writes the caller's own where none is named.
            is_endless: whether the call ends with the service and not before, so that nobody waits for its end.

        Raises:
            Draining: no new calls are taken.
            InvalidRequest: no message came, or it can't be parsed, or it is large and brings no prompt.
            NotPermitted: the caller may not act for its tenant.
            QueueFull, DeadlineExceeded: it had to wait, or came too slowly; or too much is held for its tenant.
        """
        data = await self._lanes.receive(context.peer(), context.read)
        self._require_taking(admission)  # whoever drains waits for messages that have come, and for no others
        if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in its stubs
            raise InvalidRequest("request: expected one message, got none")
        if not admission.rule.has_prompts:
            _require_small(data)
        if not is_endless:
            self._unfinished.add(context)
        message = await self._parsed(parse, data)
        admission.place_tenant(message)
        owner = admission.owner(message)
        account = Account.of_caller(admission, context) if owner is None else Account.of_tenant(owner)
        self._count(self.held, context, account, len(data) + answer_bytes(message, self._vocab_size))
        return Received(message, account)

    async def receive_all(self, parse: Parse, context: Context) -> AsyncGenerator[Any, None]:
        """Receive small messages until the caller sends no more, and parse each. All have the time of one.

        Raises:
            InvalidRequest: one can't be parsed, or is large.
            DeadlineExceeded: the caller did not end in time.
        """
        end_s = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    data = await context.read()
            except TimeoutError as error:
                raise DeadlineExceeded(f"messages: expected all within {self._timeout_s:g} s, got no end") from error
            if data is grpc.aio.EOF:  # type: ignore[attr-defined]  # not in its stubs
                return
            _require_small(data)
            yield await self._parsed(parse, data)

    def send(self, context: Context, received: Received, answer: bytes) -> bytes:
        """Note an answer that is handed to gRPC, and return it.

        Args:
            context: of the call.
            received: its message.
            answer: to be sent.

        Raises:
            QueueFull: too many of this tenant's answers are unread.
        """
        num_bytes = len(answer) - answer_bytes(received.message, self._vocab_size)
        self._count(self.held, context, received.account, max(0, num_bytes))
        self._unsent.add(context)
        when_over(context, self._unsent.discard)
        return answer

    async def parts(self, context: Context, responses: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """Yield the parts of a streamed answer; each is noted as unsent until gRPC wants the next one."""
        async with contextlib.aclosing(responses):
            async for response in responses:
                self._unsent.add(context)
                try:
                    yield response
                finally:
                    self._unsent.discard(context)

    def _require_taking(self, admission: Admission) -> None:
        if self._is_draining and not admission.method.startswith(_HEALTH):
            raise Draining("service: shutting down, no new requests")

    async def _parsed(self, parse: Parse, data: bytes) -> Any:
        try:
            if len(data) <= PIECE_BYTES:
                return parse(data)
            async with self._parsing:
                return await asyncio.to_thread(parse_in_pieces, parse(b""), data)
        except DecodeError as error:
            raise InvalidRequest(f"request: expected a protobuf message, got {len(data)} other bytes") from error

    def _count(self, shares: Shares, context: Context, account: Account, number: int) -> None:
        """Take a number until the call is over."""
        shares.take(account, number)
        when_over(context, lambda _: shares.give_back(account, number))


def _require_small(data: bytes) -> None:
    if len(data) > _SMALL_BYTES:
        raise InvalidRequest(f"request: expected at most {_SMALL_BYTES} bytes where no prompt is, got {len(data)}")
