"""The connection of a client to one server: channel options, credentials, deadlines, and what its errors mean."""

from __future__ import annotations

import json
import ssl
from os import PathLike
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import xxhash

from radixkv.service.client.address import ChannelOptions, is_on_this_machine, proxy_variable, require_address
from radixkv.service.client.diagnosis import Diagnosis
from radixkv.service.client.methods import METHODS, Method
from radixkv.service.token_ids import Prompt, read_token_ids
from radixkv.tokens import TOKEN_BYTES

File = str | PathLike[str]
Metadata = tuple[tuple[str, str], ...]

PREFIX_KEY_HEADER = "x-prefix-key"
"""Header with which a proxy sends prompts with a common prefix to the same server."""

MAX_RETRIES = 4  # gRPC makes at most 5 attempts, whatever its service config says

_RETRY_BUFFER_BYTES = 2**31 - 1  # per call; by default gRPC does not retry requests of more than 256 KiB
_MAX_TIMEOUT_S = 366 * 24 * 3600  # gRPC's clock overflows only at much longer deadlines
# By default gRPC refuses to receive messages above 4 MiB, such as the log probabilities of a long prompt.
_UNLIMITED_MESSAGES = {"grpc.max_send_message_length": -1, "grpc.max_receive_message_length": -1}


class Connection:
    """Everything about a server that `Client` and `AsyncClient` share, except the channel itself.

    Args:
        address, timeout_s, retries, prefix_key_tokens, tls_ca, token, certificate, key, options: see `Client`.

    Raises:
        OSError, TypeError, ValueError: as `Client`.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        retries: int = 0,
        prefix_key_tokens: int = 0,
        tls_ca: File | None = None,
        token: str | None = None,
        certificate: File | None = None,
        key: File | None = None,
        options: ChannelOptions = (),
    ) -> None:
        self._timeout_s = require_timeout(timeout_s)
        self._address = require_address(address)
        if isinstance(prefix_key_tokens, bool) or not (isinstance(prefix_key_tokens, int) and prefix_key_tokens >= 0):
            raise ValueError(f"prefix_key_tokens: expected a whole number from 0, got {prefix_key_tokens!r}")
        self._prefix_key_tokens = prefix_key_tokens
        _require_consistent(address, tls_ca, token, certificate, key)
        self._credentials = None if tls_ca is None else tls_credentials(tls_ca, certificate, key)
        self._metadata: Metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        self._options = channel_options(options, retries)
        self._diagnosis = Diagnosis(
            address,
            has_tls=tls_ca is not None,
            has_certificate=certificate is not None,
            proxy=proxy_variable(address, options),
        )

    def open(self) -> grpc.Channel:
        """Open a channel. It connects with the first call."""
        return open_channel(self._address, self._credentials, self._options)

    def open_async(self) -> grpc.aio.Channel:
        """Open a channel for the running event loop. It connects with the first call."""
        return open_async_channel(self._address, self._credentials, self._options)

    def timeout_s(self, timeout_s: float | None) -> float | None:
        """Return the deadline of a call in seconds: `timeout_s`, or the default of the client if it is None.

        Raises:
            ValueError: `timeout_s` is not a number above 0 and below 366 days.
        """
        return self._timeout_s if timeout_s is None else require_timeout(timeout_s)

    def metadata(self, method: Method[Any, Any], request: Any) -> Metadata:
        """Return the metadata of a call: the token, and the prefix key of the prompt."""
        if method.prompt_of is None or not self._prefix_key_tokens:
            return self._metadata
        key = prefix_key(method.prompt_of(request), self._prefix_key_tokens)
        return (*self._metadata, (PREFIX_KEY_HEADER, key))

    def error_of(self, error: grpc.RpcError, method: Method[Any, Any], timeout_s: float | None) -> grpc.RpcError:
        """Return the exception that the client raises for an error of gRPC; see `Diagnosis.error_of`."""
        return self._diagnosis.error_of(error, method.name, timeout_s)


def prefix_key(request: Prompt, num_tokens: int) -> str:
    """Return the digest of a request's tenant, adapter, salt and first tokens.

    Requests for which all of these are equal have the same key, whatever follows in the prompt. The key is only a
    routing hint: other requests may have the same key.

    Args:
        request: the message with the prompt.
        num_tokens: number of first tokens that the key covers, at least 1; all tokens of a shorter prompt.
    """
    digest = xxhash.xxh3_64()
    for name in (request.tenant, request.adapter, request.salt):
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    digest.update(read_token_ids(request)[: TOKEN_BYTES * num_tokens])
    return digest.hexdigest()


def require_timeout(timeout_s: float | None) -> float | None:
    """Check a deadline in seconds; None for none.

    Returns:
        The deadline.

    Raises:
        ValueError: it is not a number above 0 and below 366 days.
    """
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < _MAX_TIMEOUT_S):
        raise ValueError(f"timeout_s: expected more than 0 and less than {_MAX_TIMEOUT_S} seconds, got {timeout_s!r}")
    return timeout_s


def channel_options(options: ChannelOptions, retries: int) -> list[tuple[str, Any]]:
    """Return the default channel options, which allow messages and retries of any size, overridden by the caller's.

    Raises:
        ValueError: `retries` is not a whole number from 0 to `MAX_RETRIES`.
    """
    if isinstance(retries, bool) or not (isinstance(retries, int) and 0 <= retries <= MAX_RETRIES):
        raise ValueError(f"retries: expected 0 to {MAX_RETRIES}, got {retries!r}")
    merged: dict[str, Any] = dict(_UNLIMITED_MESSAGES)
    if retries:
        merged["grpc.service_config"] = _service_config(retries)
        merged["grpc.per_rpc_retry_buffer_size"] = _RETRY_BUFFER_BYTES
    merged.update(options)
    return list(merged.items())  # each name once: of two options with one name, gRPC uses the first


def server_name_options(server_name: str) -> ChannelOptions:
    """Return the options of a channel to a server whose certificate has this name; none if the name is empty."""
    return (("grpc.ssl_target_name_override", server_name),) if server_name else ()


def open_channel(address: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions) -> grpc.Channel:
    """Open a channel, with TLS if there are credentials. It connects with the first call.

    A connection to a server on this machine uses no proxy, even if an environment variable such as `http_proxy` is set,
    unless the options enable it.
    """
    options = _without_proxy(address, options)
    if credentials is None:
        return grpc.insecure_channel(require_address(address), options=options)
    return grpc.secure_channel(require_address(address), credentials, options=options)


def open_async_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: ChannelOptions
) -> grpc.aio.Channel:
    """Open a channel for the running event loop; see `open_channel`."""
    options = _without_proxy(address, options)
    if credentials is None:
        return grpc.aio.insecure_channel(require_address(address), options=options)
    return grpc.aio.secure_channel(require_address(address), credentials, options=options)


def tls_credentials(tls_ca: File, certificate: File | None = None, key: File | None = None) -> grpc.ChannelCredentials:
    """Return the credentials of a connection with TLS, or with mutual TLS if there is a certificate.

    Args:
        tls_ca: PEM file with the authorities that may have signed the server's certificate.
        certificate: PEM file with the client's own certificate chain; None for none.
        key: PEM file with its private key; None for none.

    Raises:
        OSError: a file can't be read.
        ValueError: `tls_ca` holds no certificate, or `key` does not belong to `certificate`.
    """
    authorities = Path(tls_ca).read_bytes()
    _require_certificates(authorities)
    if certificate is None or key is None:
        return grpc.ssl_channel_credentials(root_certificates=authorities)
    chain = Path(certificate).read_bytes()
    private_key = Path(key).read_bytes()
    _require_pair(certificate, key)
    return grpc.ssl_channel_credentials(authorities, private_key, chain)


def _require_consistent(
    address: str, tls_ca: File | None, token: str | None, certificate: File | None, key: File | None
) -> None:
    """Refuse incomplete credentials, and tokens that would be sent to another machine unencrypted."""
    if (certificate is None) is not (key is None):
        raise ValueError("certificate, key: each requires the other")
    if certificate is not None and tls_ca is None:
        raise ValueError("tls_ca: required with a certificate")
    if token is not None and not (token.isascii() and token.isprintable() and token.split() == [token]):
        got = "other characters" if token else "an empty string"
        raise ValueError(f"token: expected printable ASCII characters without spaces, got {got}")
    if token is not None and tls_ca is None and not is_on_this_machine(address):
        raise ValueError("token: requires tls_ca, since the server is on another machine")


def _require_certificates(authorities: bytes) -> None:
    """Refuse a file without certificates. gRPC would fail only at the first call, and print errors on stderr."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ValueError("tls_ca: the file contains no readable certificates in PEM") from None


def _require_pair(certificate: File, key: File) -> None:
    """Refuse a certificate and a key that do not match. gRPC would silently connect without them."""
    try:
        # Without a password callback, OpenSSL would ask for the password of a key on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password=lambda: b"")
    except (ssl.SSLError, ValueError):
        raise ValueError(
            "certificate, key: expected a certificate chain and its private key, both in PEM and without a password"
        ) from None


def _without_proxy(address: str, options: ChannelOptions) -> ChannelOptions:
    """Turn proxies off if the address is on this machine.

    `options` may turn them on again: of two options with the same name, gRPC uses the first.
    """
    return (*options, ("grpc.enable_http_proxy", 0)) if is_on_this_machine(address) else options


def _service_config(retries: int) -> str:
    policy = {
        "maxAttempts": 1 + retries,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    methods = [{"service": each.service, "method": each.name} for each in METHODS if each.is_idempotent]
    return json.dumps({"methodConfig": [{"name": methods, "retryPolicy": policy}]})
