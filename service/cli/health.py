"""`radixkv health`: checks whether a service accepts requests, for scripts and for the health checks of containers."""

from __future__ import annotations

import argparse
import json
import socket
import ssl
import sys
from typing import TYPE_CHECKING, Any

from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import Option, add_options

if TYPE_CHECKING:  # importing this loads gRPC, which --help and argument errors do not need
    from radixkv.service.client.methods import ServingStatus

_TIMEOUT_S = 5.0


def add_arguments(health: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    health.description = (
        "Check whether a service accepts requests. Prints SERVING and exits with 0 if it does; prints "
        "NOT_SERVING and exits with 1 if it does not, and exits with 1 if it can't be reached. Needs no credential. "
        "A service on this machine may have TLS: without --tls-ca its certificate is not verified."
    )
    add_options(health, [Option("--service", None, None, "name of one gRPC service (default: the whole server)", "")])
    add_connection(health, _TIMEOUT_S)
    health.set_defaults(command=_health)


def _health(arguments: argparse.Namespace) -> None:
    from radixkv.service.client import Unavailable
    from radixkv.service.client.address import is_on_this_machine

    with client_of(arguments) as client:
        try:
            status = client.health(arguments.service)
        except Unavailable:
            is_local = is_on_this_machine(arguments.address) and not arguments.address.startswith("unix:")
            if arguments.tls_ca is not None or not is_local:
                raise
            tls_status = _status_over_tls(arguments)
            if tls_status is None:
                raise
            status = tls_status
    print(json.dumps({"status": status.name}) if arguments.json else status.name)
    if status.name != "SERVING":
        sys.exit(1)


def _status_over_tls(arguments: argparse.Namespace) -> ServingStatus | None:
    """Ask a server with TLS on this machine, whatever its certificate is; None if there is no such server.

    No credential is sent, since the server is not authenticated.
    """
    import grpc
    from google.protobuf.wrappers_pb2 import StringValue

    from radixkv.service.client.connection import open_channel, server_name_options
    from radixkv.service.client.methods import HEALTH_CHECK, ServingStatus

    try:
        certificate, name = _certificate_at(arguments.address, arguments.timeout_s)
    except OSError:
        return None
    credentials = grpc.ssl_channel_credentials(certificate.encode())
    with open_channel(arguments.address, credentials, server_name_options(name)) as channel:
        check_health = HEALTH_CHECK.bind(channel)
        response = check_health(StringValue(value=arguments.service), timeout=arguments.timeout_s)
        return ServingStatus(response.value)


def _certificate_at(address: str, timeout_s: float) -> tuple[str, str]:
    """Return the certificate of a server with TLS, in PEM, and a name in it. Raises OSError if there is none."""
    from radixkv.service.client.address import host_of

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    address_pair = (host_of(address), int(address.rpartition(":")[2]))
    with socket.create_connection(address_pair, timeout_s) as plain, context.wrap_socket(plain) as connection:
        certificate = ssl.DER_cert_to_PEM_cert(connection.getpeercert(binary_form=True) or b"")
    # Python returns the names only of a certificate that it has verified, so verify it against itself.
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=certificate)
    with socket.create_connection(address_pair, timeout_s) as plain, context.wrap_socket(plain) as connection:
        fields: Any = connection.getpeercert() or {}
    names = [value for kind, value in fields.get("subjectAltName", ()) if kind in ("DNS", "IP Address")]
    names += [value for part in fields.get("subject", ()) for kind, value in part if kind == "commonName"]
    if not names:
        raise OSError("the certificate has no name")
    return certificate, names[0]
