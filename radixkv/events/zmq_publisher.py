"""Publishes the event log over ZMQ on its own thread."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from radixkv.config import EventsConfig
from radixkv.errors import ConfigError
from radixkv.events.curve import Curve, read_curve_keys
from radixkv.events.log_readers import MalformedRequests, ReplayReader, SubscriptionReader
from radixkv.events.published_batches import PublishedBatches
from radixkv.events.readers import EventSource
from radixkv.events.zmq_address import ZmqAddress, end_listening
from radixkv.events.zmq_port import ZmqPort
from radixkv.events.zmtp import Null, Security

# Minimum time between the beginnings of two turns of the thread. It bounds the units of work per second, so that the
# thread takes at most a tenth of a core, whatever peers send.
_TURN_S = 0.01
_CHECK_PERIOD_S = 1.0  # between checks for peers that take too long
_FLUSH_S = 0.5  # for sending the last messages
_JOIN_S = 3.0

_logger = logging.getLogger(__name__)


class ZmqPublisher:
    """Publishes each batch as `[topic, sequence, payload]` to subscribers, and again on request; see `ReplayReader`.

    The engine's thread wakes the publisher's thread with one byte unless one is unread, and never blocks. No peer can
    block the publisher's thread, or take more than a bounded amount of its memory and time; see `ZmqPort`. A slow
    subscriber loses messages, sees a gap in the sequence numbers, and can request a replay.

    Args:
        source: the log, for which the recording of events is switched on.
        config: the configuration; `zmq_endpoint` is not None.

    Attributes:
        endpoint: address of the PUB socket, with the port that was bound.
        replay_endpoint: address of the ROUTER socket; None without one.

    Raises:
        ConfigError: an address can't be bound, or a file of keys can't be used; the message names the key.
    """

    def __init__(self, source: EventSource, config: EventsConfig) -> None:
        assert config.zmq_endpoint is not None
        batches = PublishedBatches(source.log, config.topic.encode(), config.form)
        malformed_requests = MalformedRequests()
        make_security = _security_factory(config)
        self._publisher = ZmqPort(
            ZmqAddress.of("zmq_endpoint", config.zmq_endpoint),
            partial(make_security, b"PUB", (b"SUB", b"XSUB")),
            lambda: SubscriptionReader(batches),
        )
        self._ports = [self._publisher]
        self.endpoint = self._publisher.endpoint
        self.replay_endpoint: str | None = None
        if config.replay_endpoint is not None:
            try:
                router = ZmqPort(
                    ZmqAddress.of("replay_endpoint", config.replay_endpoint),
                    partial(make_security, b"ROUTER", (b"DEALER", b"REQ", b"ROUTER")),
                    lambda: ReplayReader(batches, malformed_requests.note),
                )
            except ConfigError:
                self._publisher.close()
                raise
            self._ports.append(router)
            self.replay_endpoint = router.endpoint
        self._is_stopping = False
        self._is_waking = False
        self._wake_writer, self._wake_reader = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._wake_reader.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="radixkv-events", daemon=True)
        source.log.listen(self._wake)
        source.switch_on()
        self._thread.start()

    def close(self) -> None:
        """Publish the remaining batches and stop the thread, in 3 s at most. Closing again does nothing."""
        self._is_stopping = True
        with contextlib.suppress(OSError):  # closed before
            self._wake_writer.send(b"!")
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _logger.warning("the thread that publishes events did not end within %g s", _JOIN_S)

    def _wake(self) -> None:
        """Wake the publisher's thread. Called on the engine's thread."""
        if not self._is_waking:
            self._is_waking = True
            with contextlib.suppress(OSError):  # the publisher was closed, or is about to wake
                self._wake_writer.send(b"!")

    def _read_wake_bytes(self, _: int) -> None:
        """Read the bytes that woke the thread. The flag is reset before the log is read, so that no batch is missed."""
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        self._is_waking = False

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_reader, selectors.EVENT_READ, self._read_wake_bytes)
                for port in self._ports:
                    port.register(selector)
                self._take_turns(selector)
        except Exception:
            _logger.exception("the thread that publishes events over ZMQ failed; no more events are published over ZMQ")
        finally:
            for port in self._ports:
                port.close()
            self._wake_writer.close()
            self._wake_reader.close()

    def _take_turns(self, selector: selectors.BaseSelector) -> None:
        has_more, next_check_s = False, 0.0
        while not self._is_stopping:
            timeout_s = None
            if has_more:
                timeout_s = 0.0
            elif any(port.has_peers for port in self._ports):
                timeout_s = _CHECK_PERIOD_S
            has_more = self._take_turn(selector, timeout_s)
            now_s = time.monotonic()
            if now_s >= next_check_s:
                next_check_s = now_s + _CHECK_PERIOD_S
                for port in self._ports:
                    port.close_late(now_s)
            time.sleep(_TURN_S)

        end_s = time.monotonic() + _FLUSH_S
        while self._take_turn(selector, 0.0) or self._publisher.has_unsent:
            if time.monotonic() > end_s:
                return
            time.sleep(_TURN_S)

    def _take_turn(self, selector: selectors.BaseSelector, timeout_s: float | None) -> bool:
        """Wait for work, and do a bounded part of it. Return whether more work may be left."""
        for key, events in selector.select(timeout_s):
            key.data(events)
        now_s = time.monotonic()
        for port in self._ports:
            port.accept(now_s)
        have_more = [port.serve(now_s) for port in self._ports]  # a list, so that every port is served
        return any(have_more)


def _security_factory(config: EventsConfig) -> Callable[[bytes, tuple[bytes, ...]], Security]:
    """Return a function that creates the security mechanism of a connection.

    Its arguments are the socket type of this end, and the socket types that may connect.
    """
    keys = read_curve_keys(config)
    return Null if keys is None else partial(Curve, keys)


def require_addresses(config: EventsConfig) -> list[ZmqAddress]:
    """Check that the addresses of a configuration can be bound, and that its keys can be used.

    Returns:
        The addresses.

    Raises:
        ConfigError: an address or a key cannot be used. The message names the configuration key.
    """
    read_curve_keys(config)
    endpoints = {"zmq_endpoint": config.zmq_endpoint, "replay_endpoint": config.replay_endpoint}
    addresses = [ZmqAddress.of(key, endpoint) for key, endpoint in endpoints.items() if endpoint is not None]
    with contextlib.ExitStack() as listeners:
        for address in addresses:
            listener, _ = address.listen()
            listeners.callback(end_listening, listener)
    return addresses
