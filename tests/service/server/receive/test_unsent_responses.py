import asyncio

from radixkv.service.server.receive.unsent_responses import UnsentResponses
from tests.service.serving import becomes_true


class Call:
    """What gRPC's context contains about a call: its connection."""

    def __init__(self, peer):
        self._peer = peer

    def peer(self):
        return self._peer


class Connections:
    """Records which connections are to be closed, one set of peers per call of `close`."""

    def __init__(self):
        self.closed = []

    def close(self, peers):
        self.closed.append(peers)
        return len(peers)


def test_connections_that_leave_an_answer_unread_are_closed():
    async def run():
        connections = Connections()
        unsent = UnsentResponses(0.05, connections.close)
        read, unread = Call("ipv4:1.1.1.1:1"), Call("ipv4:1.1.1.1:2")
        unsent.add(read)
        unsent.add(unread)
        unsent.discard(read)
        assert await becomes_true(lambda: bool(connections.closed))
        later = Call("ipv4:1.1.1.1:3")
        unsent.add(later)
        assert await becomes_true(lambda: len(connections.closed) == 2)
        return connections.closed

    assert asyncio.run(run()) == [{"ipv4:1.1.1.1:2"}, {"ipv4:1.1.1.1:3"}]


def test_the_log_reports_how_many_connections_were_closed(caplog):
    async def run():
        unsent = UnsentResponses(0.01, lambda _: 1)  # one of the two has disconnected
        for port in (1, 2):
            unsent.add(Call(f"ipv4:1.1.1.1:{port}"))
        assert await becomes_true(lambda: bool(caplog.records))

    asyncio.run(run())
    assert caplog.messages == ["closed 1 connections that left responses unread"]


def test_a_call_that_is_over_may_be_discarded_again():
    async def run():
        connections = Connections()
        unsent = UnsentResponses(60, connections.close)
        call = Call("ipv4:1.1.1.1:1")
        unsent.add(call)
        unsent.discard(call)
        unsent.discard(call)
        return connections.closed

    assert asyncio.run(run()) == []


def test_a_response_that_was_sent_while_the_loop_was_busy_closes_nothing():
    async def run():
        connections = Connections()
        unsent = UnsentResponses(0.02, connections.close)
        call = Call("ipv4:1.1.1.1:1")
        loop = asyncio.get_running_loop()
        busy_until_s = loop.time() + 0.05
        unsent.add(call)
        while loop.time() < busy_until_s:  # busy: no callback runs
            pass
        loop.call_later(0, unsent.discard, call)
        unread = Call("ipv4:1.1.1.1:2")
        unsent.add(unread)
        assert await becomes_true(lambda: bool(connections.closed))
        return connections.closed

    assert asyncio.run(run()) == [{"ipv4:1.1.1.1:2"}]


def test_a_stream_whose_late_message_was_sent_is_not_closed_for_its_next_one():
    async def run():
        connections = Connections()
        unsent = UnsentResponses(0.02, connections.close)
        stream, unread = Call("ipv4:1.1.1.1:1"), Call("ipv4:1.1.1.1:2")

        def send_and_wait_again():
            unsent.discard(stream)
            unsent.add(stream)

        loop = asyncio.get_running_loop()
        busy_until_s = loop.time() + 0.05
        unsent.add(stream)
        unsent.add(unread)
        while loop.time() < busy_until_s:  # both are late at the first check
            pass
        loop.call_later(
            0.05, send_and_wait_again
        )  # before the second check: timers run in the order in which they are due
        assert await becomes_true(lambda: bool(connections.closed))
        return connections.closed[0]

    assert asyncio.run(run()) == {"ipv4:1.1.1.1:2"}
