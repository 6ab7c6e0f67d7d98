"""TLS, tokens and certificates of a client: it shows who it is, and knows the server."""

from __future__ import annotations

import ipaddress
import ssl
from os import PathLike
from pathlib import Path

import grpc

from radixkv.service.client.prefix_key import Metadata, PrefixKey
from radixkv.service.token_ids import Prompt

File = str | PathLike[str]


class Access:
    """Credentials of one connection and the metadata of its calls.

    Args:
        address: of the service.
        tls_ca: PEM file with the authorities of its certificate; None for a connection without TLS.
        token: a bearer token, sent with every call; None for none.
        certificate: PEM file with the caller's own certificate chain; None for none.
        key: PEM file with its private key.
        prefix_key: makes the header of prompts.

    Raises:
        ValueError: the token would leave this machine in the clear, is no token, or files are given without others that
            they need, `tls_ca` holds no certificate, or `key` is not that of `certificate`. The message has no part of
            the token.
        OSError: a file can't be read.
    """

    def __init__(
        self,
        address: str,
        *,
        tls_ca: File | None,
        token: str | None,
        certificate: File | None,
        key: File | None,
        prefix_key: PrefixKey,
    ) -> None:
        if (certificate is None) is not (key is None):
            raise ValueError("certificate, key: expected both or neither, got one")
        if certificate is not None and tls_ca is None:
            raise ValueError("tls_ca: expected one beside a certificate, got none")
        if token is not None and not (token.isascii() and token.isprintable() and token.split() == [token]):
            got = "others" if token else "none"
            raise ValueError(f"token: expected printable ASCII characters without spaces, got {got}")
        if token is not None and tls_ca is None and not is_on_this_machine(address):
            raise ValueError("token: expected tls_ca beside it, since the service is on another machine, got none")
        self._prefix_key = prefix_key
        self.credentials = None if tls_ca is None else tls_credentials(tls_ca, certificate, key)
        self.metadata: Metadata | None = None if token is None else (("authorization", f"Bearer {token}"),)

    def metadata_of(self, request: Prompt) -> Metadata | None:
        """Return the metadata of a call with this prompt; None for none."""
        of_prompt: Metadata | None = self._prefix_key.metadata(request)
        if self.metadata is None or of_prompt is None:
            return self.metadata or of_prompt
        return self.metadata + of_prompt


def tls_credentials(tls_ca: File, certificate: File | None = None, key: File | None = None) -> grpc.ChannelCredentials:
    """Return the credentials of a connection with TLS; arguments and errors are those of `Access`."""
    authorities = Path(tls_ca).read_bytes()
    _require_certificates(authorities)
    if certificate is None or key is None:
        return grpc.ssl_channel_credentials(root_certificates=authorities)
    chain, private_key = Path(certificate).read_bytes(), Path(key).read_bytes()
    _require_pair(certificate, key)
    return grpc.ssl_channel_credentials(authorities, private_key, chain)


def _require_certificates(authorities: bytes) -> None:
    """Refuse what gRPC would refuse at the first call only, after lines of its own on stderr."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ValueError("tls_ca: expected certificates in PEM, got none that can be read") from None


def _require_pair(certificate: File, key: File) -> None:
    """Refuse a pair that gRPC would leave out of its connections without a word."""
    try:
        # A key with a password would be asked for on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError):
        raise ValueError(
            "certificate, key: expected a certificate chain and its private key without a password, both PEM, "
            "got something else"
        ) from None


def is_on_this_machine(address: str) -> bool:
    """Return whether what is sent there stays on this machine.

    >>> [is_on_this_machine(each) for each in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/s", "10.0.0.1:1")]
    [True, True, True, True, False]
    """
    if address.startswith("unix:"):
        return True
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(address: str) -> str:
    """Return the host of an address with a port.

    >>> [host_of(each) for each in ("kv-1:50051", "[::1]:1", "dns:///kv-1:50051")]
    ['kv-1', '::1', 'kv-1']
    """
    for scheme in ("ipv4:", "ipv6:", "dns:", "xds:"):
        address = address.removeprefix(scheme)
    return address.rpartition("/")[2].rpartition(":")[0].strip("[]")
