"""The server's end of a connection of ZMTP 3.0, the protocol of ZMQ, without I/O.

    peer                                   server
    greeting (64 bytes) ─────────────────▶ ◀───────────── greeting
    handshake of the mechanism: READY, or that of CURVE
    frames ──────────────────────────────▶ ◀───────────── frames

libzmq bounds the size of a frame, but neither the number of frames of a message nor the subscriptions of a peer: one
peer can make it take any amount of memory. Here a connection holds at most one message, which has at most `MAX_FRAMES`
frames of at most `MAX_FRAME_BYTES` bytes each.

Source: ZMTP 3.0 (https://rfc.zeromq.org/spec/23/), and the commands of ZMTP 3.1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

# A handshake with CURVE takes 600 bytes, a replay request 10, and a subscription the length of the topic.
MAX_FRAME_BYTES = 4096
MAX_FRAMES = 4
READ_BYTES = 4096

MORE, _LONG, COMMAND = 1, 2, 4
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING_BYTES = 64
_MAJOR_VERSION = 3
_MECHANISM_START, _MECHANISM_BYTES = len(_SIGNATURE) + 2, 20  # in the greeting, after the version
_SHORT_FRAME_BYTES = 255
_TTL_BYTES, _MAX_CONTEXT_BYTES = 2, 16  # of PING


class ZmtpError(Exception):
    """A peer has violated the protocol or a limit, or is not allowed. Its connection must be closed.

    Attributes:
        reply: bytes to send before closing, if the connection accepts them at once.
    """

    def __init__(self, reason: str, reply: bytes = b"") -> None:
        super().__init__(reason)
        self.reply = reply


class Security(Protocol):
    """The security mechanism of one connection: its handshake, and its encryption of messages.

    Attributes:
        name: name of the mechanism, as in the greeting.
        is_server: whether this end is the server of the mechanism, as stated in the greeting.
        is_ready: whether the handshake has finished, so that messages may be exchanged.
    """

    name: bytes
    is_server: bool
    is_ready: bool

    def begin(self) -> bytes:
        """Return the body of the command to send after the greeting; empty to send none."""
        ...

    def handle_handshake(self, command: bytes) -> bytes:
        """Handle the body of a handshake command. Return the body of the response; empty to send none.

        Raises:
            ZmtpError: the peer is not allowed, or the command is invalid.
        """
        ...

    def open_frame(self, flags: int, body: bytes) -> tuple[int, bytes]:
        """Return the flags and the decrypted body of a frame. Raises ZmtpError if the frame is not authentic."""
        ...

    def seal_frames(self, frames: Sequence[bytes], *, is_command: bool = False) -> list[bytes]:
        """Return the bytes to send for a message, or a command, in pieces."""
        ...


class ZmtpConnection:
    """The server's end of one connection.

    Args:
        security: security mechanism of the connection.

    Attributes:
        replies: bytes that the protocol itself has to send. Take them before the next `read`.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._buffer = bytearray()
        self._frames: list[bytes] = []
        self._has_greeting = False
        self.replies = (
            _SIGNATURE
            + bytes([_MAJOR_VERSION, 0])
            + self._security.name.ljust(_MECHANISM_BYTES, b"\0")
            + bytes([self._security.is_server])
        ).ljust(_GREETING_BYTES, b"\0")

    @property
    def is_open(self) -> bool:
        """Whether the handshake has finished."""
        return self._security.is_ready

    def feed(self, data: bytes) -> None:
        """Take bytes of the peer, at most `READ_BYTES`, after `read` has returned False."""
        self._buffer += data

    def read(self) -> list[bytes] | bool:
        """Take the greeting or one frame from the bytes so far.

        Returns:
            A whole message, as its frames; True if something else was read; False if more bytes are needed.

        Raises:
            ZmtpError: the peer has violated the protocol or a limit.
        """
        if not self._has_greeting:
            return self._read_greeting()
        frame = self._take_frame()
        if frame is None:
            return False
        flags, body = frame
        if not self._security.is_ready:
            if not flags & COMMAND:
                raise ZmtpError("the peer sent a message before the handshake was finished")
            answer = self._security.handle_handshake(body)
            if answer:
                self.replies += frame_head(COMMAND, len(answer)) + answer
            return True
        flags, body = self._security.open_frame(flags, body)
        return self._handle_command(body) if flags & COMMAND else self._add_frame(body, has_more=bool(flags & MORE))

    def encode(self, frames: Sequence[bytes]) -> list[bytes]:
        """Return a message as the bytes to send, in pieces. Frames are not copied unless they are encrypted."""
        return self._security.seal_frames(frames)

    def _read_greeting(self) -> bool:
        greeting = bytes(self._buffer[:_GREETING_BYTES])
        signature = greeting[: len(_SIGNATURE)]
        # The first byte, and a bit of the last one, distinguish the greeting from those of other protocols.
        is_whole = len(signature) == len(_SIGNATURE)
        if signature[:1] not in (b"", _SIGNATURE[:1]) or (is_whole and not signature[-1] & 1):
            raise ZmtpError("the greeting is not that of ZMTP")
        if len(greeting) > len(_SIGNATURE) and greeting[len(_SIGNATURE)] < _MAJOR_VERSION:
            raise ZmtpError("the peer uses a version of ZMTP before 3")
        if len(greeting) < _GREETING_BYTES:
            return False
        mechanism = greeting[_MECHANISM_START : _MECHANISM_START + _MECHANISM_BYTES]
        if mechanism.rstrip(b"\0") != self._security.name:
            raise ZmtpError(f"the peer does not use the mechanism {self._security.name.decode()}")
        del self._buffer[:_GREETING_BYTES]
        self._has_greeting = True
        command = self._security.begin()
        if command:
            self.replies += frame_head(COMMAND, len(command)) + command
        return True

    def _take_frame(self) -> tuple[int, bytes] | None:
        """Remove a frame from the buffer. Returns its flags and its body; None if it is not complete."""
        buffer = self._buffer
        if len(buffer) < 2:
            return None
        flags = buffer[0]
        if flags & ~(MORE | _LONG | COMMAND):
            raise ZmtpError("a frame has unknown flags")
        head_bytes = 9 if flags & _LONG else 2
        if len(buffer) < head_bytes:
            return None
        size = int.from_bytes(buffer[1:head_bytes], "big")
        if size > MAX_FRAME_BYTES:
            raise ZmtpError(f"a frame has more than {MAX_FRAME_BYTES} bytes")
        end = head_bytes + size
        if len(buffer) < end:
            return None
        body = bytes(buffer[head_bytes:end])
        del buffer[:end]
        return flags, body

    def _add_frame(self, body: bytes, *, has_more: bool) -> list[bytes] | bool:
        self._frames.append(body)
        if has_more:
            if len(self._frames) == MAX_FRAMES:
                raise ZmtpError(f"a message has more than {MAX_FRAMES} frames")
            return True
        message, self._frames = self._frames, []
        return message

    def _handle_command(self, body: bytes) -> list[bytes] | bool:
        """Read a command of ZMTP 3.1. Subscriptions become messages, as they are in 3.0."""
        name, data = split_command(body)
        if name == b"SUBSCRIBE":
            return [b"\1" + data]
        if name == b"CANCEL":
            return [b"\0" + data]
        if name == b"PING":
            context = data[_TTL_BYTES : _TTL_BYTES + _MAX_CONTEXT_BYTES]
            self.replies += b"".join(self._security.seal_frames([command_body(b"PONG", context)], is_command=True))
        elif name == b"ERROR":
            raise ZmtpError("the peer has reported an error")
        return True


class Null:
    """The mechanism without security: both ends send READY with their socket type.

    Args:
        socket_type: socket type of this end, such as `PUB`.
        peer_types: the socket types that may connect.
    """

    name = b"NULL"
    is_server = False

    def __init__(self, socket_type: bytes, peer_types: Collection[bytes]) -> None:
        self.is_ready = False
        self._socket_type = socket_type
        self._peer_types = peer_types

    def begin(self) -> bytes:
        """Return READY."""
        return command_body(b"READY", metadata(self._socket_type))

    def handle_handshake(self, command: bytes) -> bytes:
        """Take the READY of the peer."""
        name, data = split_command(command)
        if name != b"READY":
            raise ZmtpError("the handshake does not begin with READY")
        require_peer_type(data, self._peer_types)
        self.is_ready = True
        return b""

    def open_frame(self, flags: int, body: bytes) -> tuple[int, bytes]:
        """Return the arguments unchanged."""
        return flags, body

    def seal_frames(self, frames: Sequence[bytes], *, is_command: bool = False) -> list[bytes]:
        """Return the frames with their headers. Each header and each frame is a piece, so that no frame is copied."""
        pieces = []
        for flags, frame in frames_with_flags(frames, is_command=is_command):
            pieces += [frame_head(flags, len(frame)), frame]
        return pieces


def frames_with_flags(frames: Sequence[bytes], *, is_command: bool) -> list[tuple[int, bytes]]:
    """Return the frames of a message, or a command, with their flags."""
    if is_command:
        return [(COMMAND, frame) for frame in frames]
    return [(MORE if index < len(frames) else 0, frame) for index, frame in enumerate(frames, 1)]


def frame_head(flags: int, num_bytes: int) -> bytes:
    """Return the header of a frame."""
    if num_bytes <= _SHORT_FRAME_BYTES:
        return bytes([flags, num_bytes])
    return bytes([flags | _LONG]) + num_bytes.to_bytes(8, "big")


def command_body(name: bytes, data: bytes) -> bytes:
    """Return the body of a command: its name, with the length before it, and its data."""
    return bytes([len(name)]) + name + data


def split_command(body: bytes) -> tuple[bytes, bytes]:
    """Return the name and the data of a command.

    Raises:
        ZmtpError: the command has no name, or is shorter than its name.
    """
    end = 1 + (body[0] if body else 0)
    if not 1 < end <= len(body):
        raise ZmtpError("a command has no name")
    return body[1:end], body[end:]


def metadata(socket_type: bytes) -> bytes:
    """Return the properties of this end of a connection."""
    return command_body(b"Socket-Type", len(socket_type).to_bytes(4, "big") + socket_type)


def require_peer_type(data: bytes, peer_types: Collection[bytes]) -> None:
    """Check the socket type among the properties of a peer.

    Raises:
        ZmtpError: the properties are not well-formed, or a socket of this type can't connect to this one.
    """
    while data:
        name, data = split_command(data)  # a property begins like a command
        end = 4 + int.from_bytes(data[:4], "big")
        if not 4 <= end <= len(data):
            raise ZmtpError("a property is longer than the command")
        if name.lower() == b"socket-type":
            if data[4:end] not in peer_types:
                raise ZmtpError("a socket of this type can't connect to this port")
            return
        data = data[end:]
    raise ZmtpError("the peer does not state its socket type")
