"""Sends kept batches again to readers over ZMQ that missed some."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from radixkv.errors import EventsLost
from radixkv.events.event_log import EventLog

MAX_REPLAYS = 64
_BATCHES_PER_TURN = 100
_STALLED_S = 30.0
_SEQUENCE_BYTES = 8
_END = (-1).to_bytes(_SEQUENCE_BYTES, "big", signed=True)

_logger = logging.getLogger(__name__)


def sequence_frame(log: EventLog, number: int) -> bytes:
    """Write the number of a batch as readers over ZMQ count them: from 0 in each life of the process."""
    return (number - log.start - 1).to_bytes(_SEQUENCE_BYTES, "big")


@dataclass(slots=True)
class _ReplayState:
    """A replay under way: who gets it, the last number that was sent, and when it began or got on last."""

    reader: bytes
    number: int
    moved_s: float


class ReplayServer:
    """Answers replay requests on a ROUTER socket, round-robin with a few batches per turn.

        request   [reader, b"", first sequence wanted]
        answers   [reader, b"", topic, sequence, payload] ..., then [reader, b"", topic, -1, b""]

    A replay is dropped if its reader accepts nothing for 30 seconds; of more than 64 concurrent replays, the oldest is.

    Args:
        socket: a bound ROUTER socket, which is owned by this object from then on.
        log: the batches.
        topic: of all messages.
        payload: serializes the batch with a number.
    """

    def __init__(self, socket: zmq.Socket[bytes], log: EventLog, topic: bytes, payload: Callable[[int], bytes]) -> None:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue raises, instead of dropping messages
        self._socket = socket
        self._log = log
        self._topic = topic
        self._payload = payload
        self._replays: deque[_ReplayState] = deque()

    @property
    def has_replays(self) -> bool:
        """Whether any replay is in progress."""
        return bool(self._replays)

    def read_requests(self) -> None:
        """Read pending requests. An invalid one is logged and not answered."""
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != _SEQUENCE_BYTES:
                _logger.warning("a request for a replay has not the frames b'' and a sequence of eight bytes")
                continue
            number = self._log.start + int.from_bytes(frames[2], "big")
            if len(self._replays) == MAX_REPLAYS:
                self._replays.popleft()
            self._replays.append(_ReplayState(frames[0], max(number, self._log.first - 1), time.monotonic()))

    def advance(self, last: int) -> None:
        """Send the next batches to each reader, up to the number `last`."""
        for _ in range(len(self._replays)):
            replay = self._replays.popleft()
            if not self._is_done(replay, last):
                self._replays.append(replay)

    def _is_done(self, replay: _ReplayState, last: int) -> bool:
        try:
            for _ in range(_BATCHES_PER_TURN):
                replay.number = max(replay.number, self._log.first - 1)
                if replay.number >= last:
                    self._send(replay, _END, b"")
                    return True
                payload = self._payload(replay.number + 1)
                self._send(replay, sequence_frame(self._log, replay.number + 1), payload)
                replay.number += 1
                replay.moved_s = time.monotonic()
        except zmq.Again:  # the queue of the reader is full
            return time.monotonic() - replay.moved_s > _STALLED_S
        except EventsLost:  # dropped in the meantime: continue with what is kept
            return False
        except zmq.ZMQError:  # the reader has disconnected
            return True
        return False

    def _send(self, replay: _ReplayState, sequence: bytes, payload: bytes) -> None:
        self._socket.send_multipart((replay.reader, b"", self._topic, sequence, payload), zmq.NOBLOCK)
