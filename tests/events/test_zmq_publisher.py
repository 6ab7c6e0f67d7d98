from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from radixkv.config import EventsConfig
from radixkv.errors import ConfigError
from radixkv.events.zmq_publisher import ZmqPublisher
from tests.events.fake_source import SALTED, FakeSource
from tests.patience import PATIENCE_S, wait_until
from tests.started_threads import started_threads

ANYWHERE = "tcp://127.0.0.1:*"
TOKENS = 3  # index of the token ids in a stored event in the form of an array


@contextlib.contextmanager
def published(source: FakeSource, **config: Any) -> Iterator[ZmqPublisher]:
    settings = {"zmq_endpoint": ANYWHERE, "replay_endpoint": ANYWHERE, "block_size": 4, **config}
    with contextlib.closing(ZmqPublisher(source, EventsConfig(**settings))) as publisher:
        yield publisher


@contextlib.contextmanager
def connected(kind: int, endpoint: str | None) -> Iterator[zmq.Socket[bytes]]:
    assert endpoint is not None
    with zmq.Context() as context, context.socket(kind) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        if kind == zmq.SUB:
            reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(endpoint)
        yield reader


def receive(reader: zmq.Socket[bytes]) -> tuple[int, list[Any]]:
    """Return the sequence number and the events of a published message."""
    topic, sequence, payload = reader.recv_multipart()
    assert (topic, len(sequence)) == (b"", 8)
    time_s, events, rank = msgpack.unpackb(payload)
    assert isinstance(time_s, float)
    assert rank == 0
    return int.from_bytes(sequence, "big"), events


def request_replay(reader: zmq.Socket[bytes], start: int) -> list[tuple[int, list[Any]]]:
    """Request the batches from the number `start` on.

    Returns:
        The sequence number and the events of each batch, up to the end marker.
    """
    reader.send_multipart([b"", start.to_bytes(8, "big")])
    answers = []
    while True:
        empty, topic, sequence, payload = reader.recv_multipart()
        assert (empty, topic) == (b"", b"")
        if sequence == b"\xff" * 8:
            assert payload == b""
            return answers
        answers.append((int.from_bytes(sequence, "big"), msgpack.unpackb(payload)[1]))


def wait_for_subscription(source: FakeSource, reader: zmq.Socket[bytes]) -> int:
    """Publish until a subscriber gets messages, since a subscription takes effect later, and read all of them.

    Returns:
        The sequence number of the next batch.
    """
    first_tokens = iter(range(100, 10_000))

    def is_subscribed() -> bool:
        source.store(next(first_tokens), 2, 3, 4)
        return bool(reader.poll(0))

    wait_until(is_subscribed)
    sequence = receive(reader)[0]
    while sequence < source.log.num_batches - 1:
        next_sequence = receive(reader)[0]
        assert next_sequence == sequence + 1
        sequence = next_sequence
    return sequence + 1


@pytest.mark.parametrize("form", ["array", "map"])
def test_a_subscriber_gets_each_batch_in_order(form: str) -> None:
    source = FakeSource()
    with published(source, form=form) as publisher, connected(zmq.SUB, publisher.endpoint) as reader:
        first = wait_for_subscription(source, reader)
        source.store(1, 2, 3, 4, 5, 6, 7, 8)
        source.store(1, 2, 3, 4, namespace=SALTED)
        source.cache.purge()
        source.feed.publish()
        messages = [receive(reader) for _ in range(3)]
        assert [number for number, _ in messages] == [first, first + 1, first + 2]
        stored, salted, cleared = (events for _, events in messages)
        if form == "array":
            assert stored[0][0] == "BlockStored"
            assert len(stored[0][1]) == 2, "the hashes of two blocks"
            assert stored[0][2:5] == [None, [1, 2, 3, 4, 5, 6, 7, 8], 4], "the parent, the tokens and the block size"
            assert cleared == [["AllBlocksCleared"]]
        else:
            assert stored[0]["type"] == "BlockStored"
            assert stored[0]["token_ids"] == [1, 2, 3, 4, 5, 6, 7, 8]
            assert cleared == [{"type": "AllBlocksCleared"}]
        assert salted == [], "salted prompts are not published"


def test_batches_are_replayed_from_a_number_on() -> None:
    source = FakeSource()
    with published(source) as publisher, connected(zmq.DEALER, publisher.replay_endpoint) as reader:
        for token in range(20):
            source.store(token, 2, 3, 4)
        everything = request_replay(reader, 0)
        assert [number for number, _ in everything] == list(range(20))
        assert [events[0][TOKENS] for _, events in everything] == [[token, 2, 3, 4] for token in range(20)]
        assert request_replay(reader, 15) == everything[15:]
        assert request_replay(reader, 20) == []
        assert request_replay(reader, 2**64 - 1) == []


def test_a_replay_begins_with_the_oldest_kept_batch() -> None:
    source = FakeSource(max_batches=8)
    with published(source) as publisher, connected(zmq.DEALER, publisher.replay_endpoint) as reader:
        for token in range(20):
            source.store(token, 2, 3, 4)
        assert [number for number, _ in request_replay(reader, 0)] == list(range(12, 20))


def test_a_replay_may_have_more_batches_than_a_queue_of_zmq() -> None:
    source = FakeSource(max_batches=5000)
    with published(source) as publisher, connected(zmq.DEALER, publisher.replay_endpoint) as reader:
        for token in range(4000):  # libzmq queues 1,000 messages by default
            source.store(token, 2, 3, 4)
        assert [number for number, _ in request_replay(reader, 0)] == list(range(4000))


def test_a_malformed_request_is_not_answered(caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource()
    with published(source) as publisher, connected(zmq.DEALER, publisher.replay_endpoint) as reader:
        source.store(1, 2, 3, 4)
        with caplog.at_level(logging.WARNING):
            for frames in ([b""], [b"", b"123"], [b"x", bytes(8)], [b"", bytes(8), b""]):
                reader.send_multipart(frames)
            assert len(request_replay(reader, 0)) == 1
    assert caplog.text.count("malformed requests for replays") == 1


def test_readers_that_disconnect_during_a_replay_do_not_disturb_later_ones() -> None:
    source = FakeSource(max_batches=5000)
    with published(source) as publisher:
        for token in range(3000):
            source.store(token, 2, 3, 4)
        for _ in range(3):
            with connected(zmq.DEALER, publisher.replay_endpoint) as reader:
                reader.send_multipart([b"", bytes(8)])
                reader.recv_multipart()
        with connected(zmq.DEALER, publisher.replay_endpoint) as reader:
            assert len(request_replay(reader, 2990)) == 10


def test_a_stalled_subscriber_does_not_delay_others() -> None:
    source = FakeSource(max_batches=50)
    with (
        published(source) as publisher,
        connected(zmq.SUB, publisher.endpoint) as stalled,
        connected(zmq.DEALER, publisher.replay_endpoint) as reader,
    ):
        wait_for_subscription(source, stalled)
        for token in range(3000):
            source.store(token, 2, 3, 4)
        ((_, events),) = request_replay(reader, source.log.num_batches - 1)
        assert events[0][TOKENS] == [2999, 2, 3, 4]


def test_the_topic_is_the_first_frame() -> None:
    source = FakeSource()
    with (
        published(source, topic="kv@one@tiny") as publisher,
        connected(zmq.DEALER, publisher.replay_endpoint) as reader,
    ):
        reader.send_multipart([b"", bytes(8)])
        assert reader.recv_multipart()[1] == b"kv@one@tiny"


def test_closing_sends_the_last_batches_and_ends_the_thread() -> None:
    started = started_threads()
    source = FakeSource()
    publisher = ZmqPublisher(source, EventsConfig(zmq_endpoint=ANYWHERE))
    assert publisher.replay_endpoint is None
    with connected(zmq.SUB, publisher.endpoint) as reader:
        sequence = wait_for_subscription(source, reader)
        source.store(1, 2, 3, 4)
        publisher.close()
        publisher.close()  # again, which has no effect
        assert receive(reader)[0] == sequence
        source.store(1, 2, 3, 4, 5, 6, 7, 8)
    assert not started("radixkv-events")


@pytest.mark.parametrize("key", ["zmq_endpoint", "replay_endpoint"])
@pytest.mark.parametrize("endpoint", ["nowhere", "tcp://127.0.0.1:99999", "tcp://192.0.2.1:5557"])
def test_an_address_that_can_not_be_bound_is_named(key: str, endpoint: str) -> None:
    with (
        pytest.raises(ConfigError, match=rf"^events\.{key}: expected .* got '{endpoint}'"),
        published(FakeSource(), **{key: endpoint}),
    ):
        pass


def test_an_address_in_use_is_reported() -> None:
    with (
        published(FakeSource()) as publisher,
        pytest.raises(ConfigError, match="Address already in use"),
        published(FakeSource(), zmq_endpoint=publisher.endpoint),
    ):
        pass
