"""CURVE, which authenticates peers by public keys and encrypts messages. It belongs to ZMTP, ZeroMQ's wire protocol.

    peer ── HELLO ───▶        the public key of a key pair that the peer generated for this connection
         ◀─ WELCOME ──        the public key of a key pair that the server generated for it, and a cookie
         ── INITIATE ▶        the cookie, and the permanent key of the peer, which vouches for the key in HELLO
         ◀─ READY ────
         ── MESSAGE ─▶ ◀─ MESSAGE ──

The encrypted part of each command is called a box: the output of libsodium's `crypto_box` (X25519, XSalsa20, Poly1305).

Source: CurveZMQ (https://rfc.zeromq.org/spec/26/) and its use in ZMTP (https://rfc.zeromq.org/spec/25/).
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from radixkv.config import EventsConfig
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError
from radixkv.events.zmtp import (
    COMMAND,
    MORE,
    ZmtpError,
    command_body,
    frame_head,
    frames_with_flags,
    metadata,
    require_peer_type,
    split_command,
)

_VERSION = b"\1\0"
_HELLO = struct.Struct("<2s72s32s8s80s")  # version, padding, key, nonce, box
_NONCE_BYTES = 8
_LONG_NONCE_BYTES = 16
_COOKIE_BYTES = 96
_VOUCH = struct.Struct("<32s16s80s")  # permanent key, nonce, box
_MORE_INSIDE, _COMMAND_INSIDE = 1, 2  # the flags of an encrypted frame
_REFUSAL = command_body(b"ERROR", b"\x03400")  # three characters: the status code of a failed authentication

_Z85_CHARS = 40
_Z85_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The secret key of the server, and the public keys of the readers that may connect; 32 bytes each."""

    secret_key: bytes
    allowed: frozenset[bytes]


class Curve:
    """The server's end of CURVE on one connection.

    Args:
        keys: the keys of the server, and of the readers that may connect.
        socket_type: socket type of this end, such as `PUB`.
        peer_types: the socket types that may connect.
    """

    name = b"CURVE"
    is_server = True

    def __init__(self, keys: CurveKeys, socket_type: bytes, peer_types: Collection[bytes]) -> None:
        from nacl import bindings  # PyNaCl is needed only where keys are configured

        self.is_ready = False
        self._sodium = bindings
        self._keys = keys
        self._socket_type = socket_type
        self._peer_types = peer_types
        self._cookie = b""  # empty before HELLO
        # The keys of this connection: the peer's public key, this end's secret key, and the key that both ends compute.
        self._peer_key = b""
        self._own_secret_key = b""
        self._shared_key = b""
        self._peer_nonce = -1
        self._own_nonce = 0

    def begin(self) -> bytes:
        """Return no command, since the peer sends the first one."""
        return b""

    def handle_handshake(self, command: bytes) -> bytes:
        """Answer HELLO with WELCOME, and INITIATE with READY."""
        name, data = split_command(command)
        if name == b"HELLO" and not self._cookie:
            return self._handle_hello(data)
        if name == b"INITIATE" and self._cookie:
            return self._handle_initiate(data)
        raise ZmtpError("the peer violates the handshake of CURVE")

    def open_frame(self, flags: int, body: bytes) -> tuple[int, bytes]:
        """Decrypt a frame."""
        name, data = split_command(body)
        if name != b"MESSAGE":
            raise ZmtpError("a frame is not encrypted")
        plain = self._open(b"CurveZMQMESSAGEC", data, self._shared_key)
        if not plain:
            raise ZmtpError("an encrypted frame has no flags")
        inner_flags = plain[0]
        flags = (MORE if inner_flags & _MORE_INSIDE else 0) | (COMMAND if inner_flags & _COMMAND_INSIDE else 0)
        return flags, plain[1:]

    def seal_frames(self, frames: Sequence[bytes], *, is_command: bool = False) -> list[bytes]:
        """Encrypt each frame of a message, or a command."""
        pieces = []
        for flags, frame in frames_with_flags(frames, is_command=is_command):
            inner_flags = (_MORE_INSIDE if flags & MORE else 0) | (_COMMAND_INSIDE if flags & COMMAND else 0)
            body = command_body(b"MESSAGE", self._seal(b"CurveZMQMESSAGES", bytes([inner_flags]) + frame))
            pieces += [frame_head(0, len(body)), body]
        return pieces

    def _handle_hello(self, data: bytes) -> bytes:
        if len(data) != _HELLO.size:
            raise ZmtpError("HELLO has an invalid length")
        version, _, self._peer_key, nonce, box = _HELLO.unpack(data)
        if version != _VERSION:
            raise ZmtpError("the peer uses another version of CURVE")
        shared_key = _call_sodium(lambda: self._sodium.crypto_box_beforenm(self._peer_key, self._keys.secret_key))
        self._open(b"CurveZMQHELLO---", nonce + box, shared_key)
        own_key, self._own_secret_key = self._sodium.crypto_box_keypair()
        self._cookie = secrets.token_bytes(_COOKIE_BYTES)
        nonce = secrets.token_bytes(_LONG_NONCE_BYTES)
        box = self._sodium.crypto_box_afternm(own_key + self._cookie, b"WELCOME-" + nonce, shared_key)
        return command_body(b"WELCOME", nonce + box)

    def _handle_initiate(self, data: bytes) -> bytes:
        cookie, data = data[:_COOKIE_BYTES], data[_COOKIE_BYTES:]
        if cookie != self._cookie:
            raise ZmtpError("INITIATE does not contain the cookie of WELCOME")
        self._shared_key = _call_sodium(lambda: self._sodium.crypto_box_beforenm(self._peer_key, self._own_secret_key))
        plain = self._open(b"CurveZMQINITIATE", data, self._shared_key)
        if len(plain) < _VOUCH.size:
            raise ZmtpError("INITIATE is too short")
        permanent_key, nonce, box = _VOUCH.unpack_from(plain)
        shared_key = _call_sodium(lambda: self._sodium.crypto_box_beforenm(permanent_key, self._own_secret_key))
        vouched = _call_sodium(lambda: self._sodium.crypto_box_open_afternm(box, b"VOUCH---" + nonce, shared_key))
        own_permanent_key = self._sodium.crypto_scalarmult_base(self._keys.secret_key)
        if vouched != self._peer_key + own_permanent_key or permanent_key not in self._keys.allowed:
            raise ZmtpError("the peer's key is not allowed to connect", frame_head(COMMAND, len(_REFUSAL)) + _REFUSAL)
        require_peer_type(plain[_VOUCH.size :], self._peer_types)
        self.is_ready = True
        return command_body(b"READY", self._seal(b"CurveZMQREADY---", metadata(self._socket_type)))

    def _open(self, prefix: bytes, data: bytes, shared_key: bytes) -> bytes:
        """Decrypt a box of the peer, after its nonce. Nonces must increase, so that no command can be replayed."""
        nonce, box = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
        number = int.from_bytes(nonce, "big")
        if len(nonce) < _NONCE_BYTES or number <= self._peer_nonce:
            raise ZmtpError("a nonce is not larger than the previous one")
        plain = _call_sodium(lambda: self._sodium.crypto_box_open_afternm(box, prefix + nonce, shared_key))
        self._peer_nonce = number
        return plain

    def _seal(self, prefix: bytes, plain: bytes) -> bytes:
        """Return a nonce and the box of some bytes."""
        self._own_nonce += 1
        nonce = self._own_nonce.to_bytes(_NONCE_BYTES, "big")
        box: bytes = self._sodium.crypto_box_afternm(plain, prefix + nonce, self._shared_key)
        return nonce + box


def _call_sodium(compute: Callable[[], bytes]) -> bytes:
    """Return what a function of libsodium computes.

    Raises:
        ZmtpError: the peer sent a key or a box that is not valid.
    """
    from nacl.exceptions import CryptoError

    try:
        return compute()
    except (CryptoError, ValueError, TypeError) as error:
        raise ZmtpError("the peer sent a key or a box that is not valid") from error


def read_curve_keys(config: EventsConfig) -> CurveKeys | None:
    """Read the key files of the configuration. Returns None if no file is configured.

    Raises:
        ConfigError: only one of `curve_key_file` and `curve_clients` is set, PyNaCl is missing, or a file can't be
            used. The message names the setting.
    """
    if config.curve_key_file is None and config.curve_clients is None:
        return None
    if config.curve_key_file is None or config.curve_clients is None:
        raise ConfigError("events.curve_key_file, curve_clients: expected both or neither, got one")
    require_package("events.curve_key_file", "nacl", "PyNaCl", "events")
    folder = Path(config.curve_clients)
    files = sorted(folder.glob("*.key")) if folder.is_dir() else []
    if not files:
        raise ConfigError(
            f"events.curve_clients: expected a directory with a file NAME.key per subscriber, got {folder}"
        )
    allowed = frozenset(_read_key("curve_clients", file, "public-key") for file in files)
    return CurveKeys(_read_key("curve_key_file", Path(config.curve_key_file), "secret-key"), allowed)


def _read_key(setting: str, file: Path, name: str) -> bytes:
    """Read a key from a file that `zmq.auth.create_certificates` has written."""
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""  # a FIFO would block
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"events.{setting}: expected a readable file, got {file}: {error}") from error
    match = re.search(rf'^\s*{name}\s*=\s*"([!-~]+)"\s*$', text, re.MULTILINE)
    decoded = None if match is None else _decode_key(match[1])
    if decoded is None:
        raise ConfigError(
            f'events.{setting}: expected a file with a line {name} = "KEY", as zmq.auth.create_certificates writes it, '
            f"got {file}"
        )
    return decoded


def _decode_key(text: str) -> bytes | None:
    """Return the 32 bytes of a key that is written in Z85 (https://rfc.zeromq.org/spec/32/); None if it is not one.

    >>> _decode_key("0" * 40) == bytes(32), _decode_key("#" * 40), _decode_key("0" * 39)
    (True, None, None)
    """
    if len(text) != _Z85_CHARS or set(text) - set(_Z85_ALPHABET):
        return None
    values = []
    for start in range(0, _Z85_CHARS, 5):
        value = 0
        for character in text[start : start + 5]:
            value = value * 85 + _Z85_ALPHABET.index(character)
        values.append(value)
    return None if max(values) >= 2**32 else b"".join(value.to_bytes(4, "big") for value in values)
