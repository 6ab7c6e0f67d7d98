"""Publishes the event log over ZMQ on its own thread."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from functools import lru_cache

import zmq

from radixkv.api.events import EventBatch
from radixkv.config import EventsConfig
from radixkv.errors import ConfigError, EventsLost
from radixkv.events.readers import EventSource
from radixkv.events.replays import ReplayServer, sequence_frame
from radixkv.events.zmq_forms import PAYLOADS

_MAX_PORT = 65_535
_REPLAY_PERIOD_MS = 10  # maximum time between two turns of replays
_MAX_WRITTEN = 256  # serialized batches that are cached for replays
_LINGER_MS = 500  # how long `close` waits for the last messages to be sent

_logger = logging.getLogger(__name__)


class ZmqPublisher:
    """Publishes each batch as `[topic, sequence, payload]` on a PUB socket, and again on request; see `ReplayServer`.

    The engine's thread wakes the publisher's thread with one byte on a socket, unless it is awake already, and never
    blocks. A slow subscriber loses messages, sees a gap in the sequence, and requests a replay.

    Args:
        source: the source of the event log; the publisher switches recording on.
        config: `zmq_endpoint` is not None.

    Attributes:
        endpoint: address of the PUB socket, with the port that was bound.
        replay_endpoint: address of the ROUTER socket; None without one.

    Raises:
        ConfigError: an address can't be bound; the message names the key.
    """

    def __init__(self, source: EventSource, config: EventsConfig) -> None:
        assert config.zmq_endpoint is not None
        self._log = source.log
        self._write = lru_cache(maxsize=_MAX_WRITTEN)(PAYLOADS[config.form])
        self._topic = config.topic.encode()
        self._number = self._log.start
        self._is_stopping = False
        self._is_waking = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._publisher, self.endpoint = _bound(self._context, zmq.PUB, "zmq_endpoint", config.zmq_endpoint)
            self._replays, self.replay_endpoint = None, config.replay_endpoint
            if config.replay_endpoint is not None:
                endpoint = config.replay_endpoint
                router, self.replay_endpoint = _bound(self._context, zmq.ROUTER, "replay_endpoint", endpoint)
                self._replays = ReplayServer(router, self._log, self._topic, self._payload)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._waking, self._wakes = socket.socketpair()
        self._waking.setblocking(False)
        self._wakes.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(router if self._replays else None,), daemon=True)
        self._thread.name = "radixkv-events"
        self._log.listen(self._wake)
        source.switch_on()
        self._thread.start()

    def close(self) -> None:
        """Publish the remaining batches and stop the thread. Closing again does nothing."""
        self._is_stopping = True
        with contextlib.suppress(OSError):  # closed before
            self._waking.send(b"!")
        self._thread.join()

    def _wake(self) -> None:
        """Wake the publisher's thread. Called on the engine's thread."""
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(OSError):  # the publisher was closed, or is about to wake
                self._waking.send(b"!")

    def _run(self, router: zmq.Socket[bytes] | None) -> None:
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if router is not None:
            poller.register(router, zmq.POLLIN)
        try:
            while not self._is_stopping:
                replays = self._replays
                poller.poll(_REPLAY_PERIOD_MS if replays is not None and replays.has_replays else None)
                with contextlib.suppress(BlockingIOError):
                    self._wakes.recv(4096)
                self._is_waking = False  # reset before reading the log, so that the next batch wakes the thread again
                self._publish()
                if replays is not None:
                    replays.read_requests()
                    replays.advance(self._number)
            self._publish()
        except Exception:
            _logger.exception("stopped publishing events over ZMQ because of an error")
        finally:
            self._context.destroy(linger=_LINGER_MS)
            self._waking.close()
            self._wakes.close()

    def _publish(self) -> None:
        """Send new batches. Subscribers whose queues are full lose them; this never blocks."""
        while self._number < self._log.last:
            try:
                payload = self._payload(self._number + 1)
            except EventsLost:
                _logger.warning("the event log dropped events before they were published; subscribers see a gap")
                self._number = self._log.first - 1
                continue
            self._number += 1
            self._publisher.send_multipart((self._topic, sequence_frame(self._log, self._number), payload))

    def _payload(self, number: int) -> bytes:
        """Return the serialized batch with a number. Raises EventsLost if it was dropped."""
        batch = self._log.after(number - 1)
        assert isinstance(batch, EventBatch)
        return self._write(batch)


def require_addresses(config: EventsConfig) -> None:
    """Check that the addresses of a configuration can be bound.

    Raises:
        ConfigError: one can't be bound; the message names the key.
    """
    kinds = {"zmq_endpoint": zmq.PUB, "replay_endpoint": zmq.ROUTER}
    endpoints = {"zmq_endpoint": config.zmq_endpoint, "replay_endpoint": config.replay_endpoint}
    # Leaving the context waits until the addresses are free again.
    with zmq.Context() as context, contextlib.ExitStack() as ends:
        for key, endpoint in endpoints.items():
            if endpoint is not None:
                ends.enter_context(_bound(context, kinds[key], key, endpoint)[0])


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, key: str, endpoint: str
) -> tuple[zmq.Socket[bytes], str]:
    made = context.socket(kind)
    try:
        port = endpoint.rpartition(":")[2]
        if endpoint.startswith("tcp:") and port.isdigit() and int(port) > _MAX_PORT:  # ZMQ takes it modulo 65536
            raise zmq.ZMQError(zmq.EINVAL)
        made.bind(endpoint)
    except zmq.ZMQError as error:
        made.close(linger=0)
        raise ConfigError(
            f"events.{key}: expected a ZMQ address that can be bound, such as tcp://127.0.0.1:5557, got "
            f"{endpoint!r}: {error}"
        ) from error
    return made, made.getsockopt_string(zmq.LAST_ENDPOINT)
