"""Sends calls of a fleet to a replica, and to another one if that fails before it has answered anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from radixkv.errors import Cause, NoReplica
from radixkv.service.fleet.replica_connection import ReplicaConnection, ReplicaLost
from radixkv.service.fleet.routing_request import Question, Routed
from radixkv.service.server.status import CAUSE

Choose = Callable[[Question], Awaitable[Routed]]

_PAUSE_S = 0.1


class ReplicaRefusal(Exception):
    """A replica refused a call, or can't be reached, and no other one can answer it. Its status goes to the caller.

    Attributes:
        code: of gRPC.
        details: in words.
        trailing: metadata of the answer.
    """

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, Any], ...] = ()) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing

    def is_of(self, cause: Cause) -> bool:
        """Return whether the replica names this cause, whatever its status is."""
        return (CAUSE, cause.value) in self.trailing


class Forwarder:
    """Asks replicas, one after the other, until one answers.

        choose ─▶ ask ─▶ answer
           ▲       │ UNAVAILABLE, or silence to health checks, before the first part of an answer
           └───────┘ not that one again; after the first part the call ends with UNAVAILABLE

    A replica that can't reach the source of its K/V is not to blame: the caller is told.

    Args:
        choose: routes a question; raises NoReplica if no replica is left for it.
        wait_s: seconds that a call waits for a replica while there is none.
        sleep: waits, in seconds.
        clock: seconds, never going back.

    Attributes:
        num_retries: times that a call was sent to another replica.
    """

    def __init__(
        self,
        choose: Choose,
        wait_s: float,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_retries = 0
        self._choose = choose
        self._wait_s = wait_s
        self._sleep = sleep
        self._clock = clock

    async def answer(
        self, question: Question, ask: Callable[[ReplicaConnection], Awaitable[Any]]
    ) -> tuple[Routed, Any]:
        """Ask for one message.

        Args:
            question: the prompt.
            ask: makes the call to a replica.

        Returns:
            The replica, and its answer. The caller tells `Routed.finish`.

        Raises:
            ReplicaRefusal: what the replica answered, or that none can be reached.
            NoReplica: none is there.
        """
        failure: ReplicaRefusal | None = None
        while True:
            routed = await self.routed(question, failure)
            routed.connection.num_calls += 1
            try:
                return routed, await routed.connection.wait_for(ask(routed.connection))
            except (grpc.aio.AioRpcError, ReplicaLost) as error:
                routed.finish(None)
                failure = await self._failure(question, routed, error)
            except BaseException:
                routed.finish(None)
                raise
            finally:
                routed.connection.num_calls -= 1

    async def stream(
        self, question: Question, ask: Callable[[ReplicaConnection], Any]
    ) -> AsyncGenerator[tuple[Routed, Any], None]:
        """Ask for a stream of messages; see `answer`. Yields each with the replica.

        Raises:
            ReplicaRefusal: also if the replica is lost after it has answered something.
        """
        failure: ReplicaRefusal | None = None
        while True:
            routed = await self.routed(question, failure)
            call, num_parts = ask(routed.connection), 0
            routed.connection.num_calls += 1
            try:
                while (part := await routed.connection.wait_for(call.read())) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    num_parts += 1
                    yield routed, part
                return
            except (grpc.aio.AioRpcError, ReplicaLost) as error:
                failure = await self._failure(question, routed, error, is_begun=num_parts > 0)
            finally:
                routed.connection.num_calls -= 1
                routed.finish(None)
                call.cancel()

    async def routed(self, question: Question, failure: ReplicaRefusal | None = None) -> Routed:
        """Choose a replica; where there is none, wait for one that starts, such as one that Ray starts again.

        Raises:
            ReplicaRefusal: `failure`, if there is none in time.
            NoReplica: the same without a failure.
        """
        end_s = self._clock() + self._wait_s
        while True:
            try:
                return await self._choose(question)
            except NoReplica:
                if self._clock() >= end_s:
                    if failure is not None:
                        raise failure from None
                    raise
            await self._sleep(_PAUSE_S)

    async def _failure(
        self, question: Question, routed: Routed, error: Exception, *, is_begun: bool = False
    ) -> ReplicaRefusal:
        """Return why a replica did not answer, if another one may be asked; else raise it."""
        if isinstance(error, grpc.aio.AioRpcError):
            trailing: tuple[Any, ...] = tuple(error.trailing_metadata() or ())
            refusal = ReplicaRefusal(error.code(), error.details() or "", trailing)
        else:
            refusal = ReplicaRefusal(grpc.StatusCode.UNAVAILABLE, str(error))
        if refusal.code is not grpc.StatusCode.UNAVAILABLE or refusal.is_of(Cause.KV_SOURCE):
            raise refusal from error
        if is_begun:
            raise ReplicaRefusal(
                grpc.StatusCode.UNAVAILABLE,
                f"replica {routed.name}: expected the rest of the answer, got none; ask again with what has come",
            ) from error
        await routed.connection.look()
        question.avoid.add(routed.name)
        self.num_retries += 1
        return refusal
