"""TLS of a server: its certificate, private key and client CAs, read again when the files change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

import grpc

from radixkv.config import ServerConfig
from radixkv.config.regular_file import read_named
from radixkv.errors import ConfigError
from radixkv.service.server.auth.reloaded_files import ReloadedFiles


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Contents of the files, and an SSL context for HTTPS made from them.

    Attributes:
        certificate: the certificate chain, PEM.
        key: the private key, PEM.
        client_ca: the CAs of client certificates, PEM; None if clients are not asked for certificates.
        https: a context with the same certificate, which does not ask clients for one.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    https: ssl.SSLContext = field(repr=False)


class Tls:
    """The TLS of one server.

    Args:
        config: has `tls_certificate` and `tls_key`, and may have `client_ca`.

    Raises:
        ConfigError: a file cannot be read or used, or the key does not match the certificate.
    """

    def __init__(self, config: ServerConfig) -> None:
        paths = [path for path in (config.tls_certificate, config.tls_key, config.client_ca) if path is not None]
        self._files = ReloadedFiles("TLS certificates", paths, lambda: _read_files(config))
        self._needs_client_certificate = config.client_ca is not None

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one gRPC port. After the files change, new connections use the new contents."""
        last_fetched = self._files.get()

        def fetch_if_changed() -> grpc.ServerCertificateConfiguration | None:  # called before each handshake
            nonlocal last_fetched
            files = self._files.get()
            if files is last_fetched:
                return None
            last_fetched = files
            return _grpc_configuration(files)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(last_fetched),
            fetch_if_changed,  # type: ignore[arg-type]  # the stubs lack None, which means no change
            self._needs_client_certificate,
        )

    def https(self) -> ssl.SSLContext:
        """Return the SSL context for the next HTTPS connection."""
        return self._files.get().https


def _read_files(config: ServerConfig) -> TlsFiles:
    certificate = _read_pem("tls_certificate", config.tls_certificate)
    key = _read_pem("tls_key", config.tls_key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a password would make OpenSSL ask for it on the terminal.
        context.load_cert_chain(str(config.tls_certificate), str(config.tls_key), password="")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            "server.tls_key: it must be the private key of server.tls_certificate, both in PEM and without a password"
        ) from error
    if config.client_ca is None:
        return TlsFiles(certificate, key, None, context)
    client_ca = _read_pem("client_ca", config.client_ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=client_ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError("server.client_ca: the file contains no readable certificates in PEM") from error
    return TlsFiles(certificate, key, client_ca, context)


def _read_pem(config_key: str, path: str | None) -> bytes:
    if path is None:
        raise ConfigError(f"server.{config_key}: the file is not configured")
    return read_named(f"server.{config_key}", path)


def _grpc_configuration(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(files.key, files.certificate)], root_certificates=files.client_ca
    )
