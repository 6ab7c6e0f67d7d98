"""Subscribers to `EventService.Subscribe` in a separate process: some read slowly, some never, some are refused.

    python -m bench.events.callers ADDRESS COUNT

Prints `ACCEPTED REFUSED` when the first call of each caller was accepted or refused, and continues until stdin is
closed. Callers whose call was refused or has ended retry after a second. Once accepted, every second caller reads at
most ten batches per second; the others never read.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

import grpc.aio

from radixkv.v1 import events_pb2, events_pb2_grpc

RETRY_S = 1.0
READ_PERIOD_S = 0.1
CALLERS_PER_CONNECTION = 50
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]


class SubscribeCallers:
    """Clients that call `Subscribe`, each in a task.

    Args:
        stubs: stubs of EventService, one per connection; callers are spread evenly over them.
        count: number of callers.

    Attributes:
        num_accepted, num_refused: callers by the result of their first call.
    """

    def __init__(self, stubs: Sequence[Any], count: int) -> None:
        self.num_accepted = 0
        self.num_refused = 0
        self._all_answered = asyncio.Event()
        self._count = count
        self._tasks = [asyncio.create_task(self._call(stubs[i % len(stubs)], i % 2 == 0)) for i in range(count)]

    async def wait_for_answers(self) -> None:
        """Wait until the first call of each caller was accepted or refused."""
        await self._all_answered.wait()

    async def stop(self) -> None:
        """Cancel all calls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _call(self, stub: Any, reads: bool) -> None:
        is_first = True
        while True:
            call = stub.Subscribe(events_pb2.SubscribeRequest(start_sequence_number=0))
            try:
                await call.initial_metadata()
                is_accepted = not call.done()
            except grpc.aio.AioRpcError:
                is_accepted = False
            if is_first:
                is_first = False
                self._count_answer(is_accepted)
            if is_accepted:
                await _read_slowly_or_never(call, reads)
            await asyncio.sleep(RETRY_S)

    def _count_answer(self, is_accepted: bool) -> None:
        self.num_accepted += is_accepted
        self.num_refused += not is_accepted
        if self.num_accepted + self.num_refused == self._count:
            self._all_answered.set()


async def _read_slowly_or_never(
    call: grpc.aio.UnaryStreamCall[events_pb2.SubscribeRequest, events_pb2.EventBatch], reads: bool
) -> None:
    """Read slowly until the stream ends, or keep the stream open and never read."""
    if not reads:
        await call.wait_for_connection()
        await asyncio.Event().wait()  # until the task is cancelled
    try:
        async for _ in call:
            await asyncio.sleep(READ_PERIOD_S)
    except grpc.aio.AioRpcError:  # the server ends a stream whose subscriber reads too slowly
        return


async def _run(address: str, count: int) -> None:
    num_connections = -(-count // CALLERS_PER_CONNECTION)
    channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(num_connections)]
    stubs = [events_pb2_grpc.EventServiceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    callers = SubscribeCallers(stubs, count)
    await callers.wait_for_answers()
    print(callers.num_accepted, callers.num_refused, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await callers.stop()
    for channel in channels:
        await channel.close(None)


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], int(sys.argv[2])))
