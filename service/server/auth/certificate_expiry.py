"""Reads from a client certificate when it expires."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from functools import lru_cache

# Types of ASN.1 values in DER.
_VERSION = 0xA0
_UTC_TIME = 0x17


@lru_cache(maxsize=1024)
def expiry_of(pem: bytes) -> float:
    """Return the Unix time after which a certificate is not valid.

    Args:
        pem: a certificate that TLS has verified, PEM.

    Raises:
        ValueError: `pem` is not a certificate.
    """
    der = ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))
    try:
        _, start, _ = _read_value(der, 0)  # the certificate
        _, start, _ = _read_value(der, start)  # its signed part
        value_type, _, end = _read_value(der, start)
        if value_type != _VERSION:
            end = start  # version 1 has no version number, so this value was already the serial number
        for _ in ("serial number", "algorithm", "issuer"):
            _, _, end = _read_value(der, end)
        _, start, _ = _read_value(der, end)  # the validity
        _, _, end = _read_value(der, start)  # the time from which it is valid
        value_type, start, end = _read_value(der, end)
    except IndexError:
        raise ValueError("certificate: the DER data are incomplete") from None
    text = der[start:end].decode("ascii")
    time = datetime.strptime(text, "%y%m%d%H%M%SZ" if value_type == _UTC_TIME else "%Y%m%d%H%M%SZ")
    return time.replace(tzinfo=UTC).timestamp()


def _read_value(der: bytes, offset: int) -> tuple[int, int, int]:
    """Return the type of the value that starts at an offset, and the offsets at which its content begins and ends."""
    value_type, length, start = der[offset], der[offset + 1], offset + 2
    if length & 0x80:  # the long form: the other bits are the number of bytes that encode the length
        start += length & 0x7F
        length = int.from_bytes(der[offset + 2 : start])
    return value_type, start, start + length
