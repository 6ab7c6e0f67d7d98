"""Forwards calls to a replica, and retries them on another one if it fails before the first response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from radixkv.errors import Cause, NoReplica
from radixkv.service.client.errors import CAUSE_KEY
from radixkv.service.fleet.replica_connection import ReplicaConnection, ReplicaLost
from radixkv.service.fleet.routing_request import RoutedRequest, RoutingRequest

Choose = Callable[[RoutingRequest], Awaitable[RoutedRequest]]

_PAUSE_S = 0.1  # between two attempts to choose a replica while there is none


class ReplicaRefusal(Exception):
    """A replica refused a call, or no replica can be reached. The client gets the status in `code`.

    Attributes:
        code: gRPC status.
        details: message.
        trailing: trailing metadata.
    """

    def __init__(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, Any], ...] = ()) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.trailing = trailing

    def is_of(self, cause: Cause) -> bool:
        """Return whether the trailing metadata has this cause."""
        return (CAUSE_KEY, cause.value) in self.trailing


class Forwarder:
    """Calls replicas one after the other until one responds.

        choose ─▶ call ─▶ response
           ▲       │ UNAVAILABLE or failed health checks, before the first response
           └───────┘ another replica; after the first response the call ends with UNAVAILABLE

    A call is not retried if the replica could not fetch K/V from the server that the request names (`kv_source`).

    Args:
        choose: chooses a replica; raises NoReplica if none is left.
        wait_s: seconds for which a call waits for a replica while there is none.
        sleep: sleeps for a number of seconds.
        clock: a monotonic clock in seconds.
    """

    def __init__(
        self,
        choose: Choose,
        wait_s: float,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choose = choose
        self._wait_s = wait_s
        self._sleep = sleep
        self._clock = clock

    async def call(
        self, prompt: RoutingRequest, make_call: Callable[[ReplicaConnection], Awaitable[Any]]
    ) -> tuple[RoutedRequest, Any]:
        """Make a call with one response.

        Args:
            prompt: the prompt to route.
            make_call: makes the call on a replica.

        Returns:
            The replica, and its response. The caller must call `RoutedRequest.finish`.

        Raises:
            ReplicaRefusal: the replica refused the call, or none can be reached.
            NoReplica: there is no replica.
        """
        failure: ReplicaRefusal | None = None
        while True:
            routed = await self.choose(prompt, failure)
            with routed.connection.in_flight():
                try:
                    return routed, await routed.connection.wait_for(make_call(routed.connection))
                except (grpc.aio.AioRpcError, ReplicaLost) as error:
                    routed.finish(None)
                    failure = await self._prepare_retry(prompt, routed, error)
                except BaseException:
                    routed.finish(None)
                    raise

    async def stream(
        self, prompt: RoutingRequest, make_call: Callable[[ReplicaConnection], Any]
    ) -> AsyncGenerator[tuple[RoutedRequest, Any], None]:
        """Make a call with a stream of responses; see `call`. Yields each response with the replica.

        Raises:
            ReplicaRefusal: also if the replica is lost after its first response.
        """
        failure: ReplicaRefusal | None = None
        while True:
            routed = await self.choose(prompt, failure)
            call, has_begun = make_call(routed.connection), False
            with routed.connection.in_flight():
                try:
                    while True:
                        response = await routed.connection.wait_for(call.read())
                        if response is grpc.aio.EOF:  # type: ignore[attr-defined]
                            return
                        has_begun = True
                        yield routed, response
                except (grpc.aio.AioRpcError, ReplicaLost) as error:
                    failure = await self._prepare_retry(prompt, routed, error, has_begun=has_begun)
                finally:
                    routed.finish(None)
                    call.cancel()

    async def choose(self, prompt: RoutingRequest, failure: ReplicaRefusal | None = None) -> RoutedRequest:
        """Choose a replica; if there is none, wait for one to start.

        Raises:
            ReplicaRefusal: `failure`, if there is no replica in time.
            NoReplica: there is no replica in time, and `failure` is None.
        """
        end_s = self._clock() + self._wait_s
        while True:
            try:
                return await self._choose(prompt)
            except NoReplica:
                if self._clock() >= end_s:
                    if failure is not None:
                        raise failure from None
                    raise
            await self._sleep(_PAUSE_S)

    async def _prepare_retry(
        self, prompt: RoutingRequest, routed: RoutedRequest, error: Exception, *, has_begun: bool = False
    ) -> ReplicaRefusal:
        """Add the failed replica to `prompt.avoid`, so that the call can be retried on another replica.

        Returns:
            The error of the call.

        Raises:
            ReplicaRefusal: the error of the call, if it must not be retried.
        """
        if isinstance(error, grpc.aio.AioRpcError):
            trailing: tuple[Any, ...] = tuple(error.trailing_metadata() or ())
            refusal = ReplicaRefusal(error.code(), error.details() or "", trailing)
        else:
            refusal = ReplicaRefusal(grpc.StatusCode.UNAVAILABLE, str(error))
        if refusal.code is not grpc.StatusCode.UNAVAILABLE or refusal.is_of(Cause.KV_SOURCE):
            raise refusal from error
        if has_begun:
            raise ReplicaRefusal(
                grpc.StatusCode.UNAVAILABLE,
                f"replica {routed.name}: it was lost in the middle of the response; send the request again, with the "
                "received tokens appended to the prompt",
            ) from error
        # Update `is_up` before the next choice, so that other calls avoid the replica, too.
        await routed.connection.check()
        prompt.avoid.add(routed.name)
        return refusal
