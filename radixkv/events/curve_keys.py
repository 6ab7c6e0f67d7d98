"""The keys of CURVE, the encryption of ZMQ: the server's key, and the keys of the readers that may connect."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from radixkv.config import EventsConfig
from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError

_Z85_CHARS = 40
_Z85_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The secret key of the server, and the public keys of the readers that may connect; 32 bytes each."""

    secret_key: bytes
    allowed: frozenset[bytes]


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
