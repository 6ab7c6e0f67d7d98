"""Translates the errors of gRPC into the exceptions of the clients.

gRPC reports a refused connection, a wrong certificate and a draining server with the same status and different texts.
The patterns match these texts loosely, since they differ between versions (tested with 1.76 and 1.85). A text that
matches no pattern becomes a part of the message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import grpc

from radixkv.service.client import errors
from radixkv.service.client.errors import ServiceError

_KINDS: dict[grpc.StatusCode, type[ServiceError]] = {
    kind.status: kind
    for kind in (
        errors.InvalidArgument,
        errors.OutOfRange,
        errors.FailedPrecondition,
        errors.NotFound,
        errors.Unimplemented,
        errors.Unauthenticated,
        errors.PermissionDenied,
        errors.ResourceExhausted,
        errors.Unavailable,
        errors.DeadlineExceeded,
        errors.Cancelled,
        errors.DataLoss,
        errors.InternalError,
    )
}

# gRPC appends the error of the last address that it tried.
_NOT_CONNECTED = re.compile(
    r"failed to connect to (?:all|remote)|not match SSL server name|Peer name .* is not in peer"
)
_NO_NAME = re.compile(r"errors resolving|DNS resolution failed|name resolution|lookup failed", re.IGNORECASE)
_LAST_ERROR = re.compile(r".*last error: (?:[A-Z_]+: )?(?:(?:ipv4|ipv6|unix)\S*: )?", re.DOTALL)
# Why no connection was made. The first pattern that matches is used.
_REASONS_WITHOUT_CONNECTION = tuple(
    (re.compile(pattern, re.IGNORECASE), text)
    for pattern, text in (
        (
            r"connection refused|no such file or directory",
            "no server is listening at {address}; is `radixkv serve` running there?",
        ),
        (
            r"certificate_verify_failed.*(expired|not yet valid)",
            "the certificate of {address} has expired or is not valid yet; renew it, or check the clocks ({reason})",
        ),
        (
            r"certificate_verify_failed",
            "the certificate of {address} is not signed by an authority in `tls_ca` (--tls-ca); "
            "use the file with the authority that signed it",
        ),
        (
            r"peer name .* is not in peer|not match SSL server name|hostname verification",
            "the certificate of {address} is for another name; use the name or IP address that it was issued for",
        ),
        (
            r"wrong_version_number",
            "{address} does not speak TLS; check the port, or connect without `tls_ca` (--tls-ca)",
        ),
        (
            r"handshake failed",
            "no TLS connection to {address}: {reason}; the server may require a certificate (`certificate` and `key`, "
            "--certificate and --key), or have no TLS",
        ),
        (
            r"parsing http/2|settings frame",
            "{address} answers, but does not speak gRPC; is it an HTTP port, such as the server's metrics port?",
        ),
    )
)
_CLOSED_EARLY = re.compile(r"socket closed|connection reset|broken pipe|connection aborted|EOF", re.IGNORECASE)
_TOO_LARGE = re.compile(r"(?:(SERVER|CLIENT): )?(Received|Sent) message larger than max \((\d+) vs\.? (\d+)\)")
_HTTP_STATUS = re.compile(r"Received http2 header with status: (\d+)", re.IGNORECASE)
_NO_GRPC_STATUS = re.compile(r"No status received|invalid content-type|Missing status", re.IGNORECASE)
_CONNECTION_LOST = re.compile(
    r"socket closed|recvmsg|sendmsg|connection reset|broken pipe|cancelling all calls|GOAWAY|keepalive|ping timeout"
    r"|transport (?:closed|is closing)|RST_STREAM|endpoint closing|stream removed|connection aborted|server shutdown",
    re.IGNORECASE,
)
_NO_METHOD = re.compile(r"method not found|unknown (?:method|service)|not implemented", re.IGNORECASE)
_GRPC_DEADLINE = re.compile(r"(?:.*\()?deadline exceeded|deadline: passed", re.IGNORECASE)
_CANCELLED_HERE = re.compile(r"locally cancelled|channel closed|upon garbage collection", re.IGNORECASE)
# Messages of the server itself begin with the field, the option or the component that they are about.
_SERVER_MESSAGE = re.compile(r"[a-z][\w.\[\]-]*(?:, [\w.\[\]-]+)*: ")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Explains failed calls to one server.

    Attributes:
        address: address of the server.
        has_tls: whether the connection uses TLS.
        has_certificate: whether the client authenticates with a certificate.
        proxy: environment variable that names the HTTP proxy in use; empty for none.
    """

    address: str
    has_tls: bool = False
    has_certificate: bool = False
    proxy: str = ""

    def error_of(self, error: grpc.RpcError, call: str, timeout_s: float | None) -> grpc.RpcError:
        """Return the exception that a client raises for an error of gRPC.

        Args:
            error: the error of a call that has ended.
            call: name of the call, such as `Prefill`.
            timeout_s: its deadline in seconds; None if it had none.

        Returns:
            A `ServiceError`; the error itself if it is one already or has no status.
        """
        if isinstance(error, ServiceError) or not hasattr(error, "code"):
            return error
        call_error: Any = error
        code = call_error.code()
        details = call_error.details() or ""
        kind, message = self._classify(code, details, call, timeout_s)
        return kind(
            message,
            kind.status if issubclass(kind, errors.ConnectError) else code,  # ConnectError is always UNAVAILABLE
            details=details,
            initial_metadata=call_error.initial_metadata(),
            trailing_metadata=call_error.trailing_metadata(),
            # For a call that was cancelled locally, `debug_error_string` would wait forever.
            debug_error_string="" if code is grpc.StatusCode.CANCELLED else call_error.debug_error_string(),
            address=self.address,
            call=call,
            timeout_s=timeout_s,
        )

    def _classify(
        self, code: grpc.StatusCode, details: str, call: str, timeout_s: float | None
    ) -> tuple[type[ServiceError], str]:
        """Return the class and the message for a failure."""
        kind = _KINDS.get(code, ServiceError)
        if _SERVER_MESSAGE.match(details) and kind is not errors.DeadlineExceeded:
            return kind, details
        if _NO_NAME.search(details) or _NOT_CONNECTED.search(details):
            return errors.ConnectError, self._describe_no_connection(details)
        if (match := _TOO_LARGE.search(details)) is not None:
            return errors.MessageTooLarge, self._describe_too_large(match)
        if (match := _HTTP_STATUS.search(details)) is not None:
            return kind, (
                f"{self.address} answered with HTTP status {match[1]} instead of gRPC: "
                "is it a proxy whose backend is down, or another server?"
            )
        if _NO_GRPC_STATUS.search(details):
            return kind, f"{self.address} answers, but not as a gRPC service; check the address ({details})"
        if kind is errors.DeadlineExceeded:
            return kind, self._describe_deadline(details, call, timeout_s)
        if kind is errors.Cancelled and _CANCELLED_HERE.search(details):
            return kind, f"{call} was cancelled, because this program cancelled the call or closed the client"
        if kind is errors.Unimplemented and _NO_METHOD.search(details):
            return kind, (
                f"the service at {self.address} does not offer {call}: it is disabled, or this is another server"
            )
        if _CONNECTION_LOST.search(details):
            return kind, (
                f"the connection to {self.address} ended before {call} was answered in full; the server may have "
                f"stopped or restarted ({details})"
            )
        if kind is errors.Unavailable or kind is ServiceError:
            return kind, f"{call} failed at {self.address}: {details or code.name}"
        return kind, details or f"{call} failed at {self.address} without a reason"

    def _describe_no_connection(self, details: str) -> str:
        address = self.address
        reason = _LAST_ERROR.sub("", details, count=1)
        if self.proxy:
            return (
                f"no connection to {address} through the HTTP proxy that the environment variable {self.proxy} names "
                f"({reason}); to connect without it, add the host to no_proxy"
            )
        if _NO_NAME.search(details):
            reason = details.rpartition(": ")[2].strip("[]")
            return f"the host name of {address} can't be resolved; check the address ({reason})"
        for pattern, text in _REASONS_WITHOUT_CONNECTION:
            if pattern.search(reason):
                return text.format(address=address, reason=reason)
        if not _CLOSED_EARLY.search(reason):
            return f"no connection to {address}: {reason}"
        if not self.has_tls:
            return f"{address} closed the connection; if the server uses TLS, connect with `tls_ca` (--tls-ca)"
        if not self.has_certificate:
            return (
                f"{address} closed the TLS connection; the server may require a certificate "
                "(`certificate` and `key`, --certificate and --key)"
            )
        return f"{address} closed the TLS connection; does the server trust the authority that signed `certificate`?"

    def _describe_too_large(self, match: re.Match[str]) -> str:
        side, direction, num_bytes, limit = match[1], match[2], f"{int(match[3]):,}", f"{int(match[4]):,}"
        if direction == "Received" and side != "CLIENT":
            return (
                f"the request has {num_bytes} bytes, more than the {limit} that {self.address} accepts; send a shorter "
                "prompt, or raise `server.max_message_bytes` there"
            )
        if direction == "Received":
            return (
                f"the response has {num_bytes} bytes, more than the {limit} that this client accepts; raise its "
                "channel option `grpc.max_receive_message_length`, or request less, such as no logits"
            )
        if side == "SERVER":
            return f"the response has {num_bytes} bytes, more than the {limit} that {self.address} sends; request less"
        return (
            f"the request has {num_bytes} bytes, more than the {limit} that this client sends; raise its channel "
            "option `grpc.max_send_message_length`, or send a shorter prompt"
        )

    def _describe_deadline(self, details: str, call: str, timeout_s: float | None) -> str:
        if not _GRPC_DEADLINE.match(details):
            return details or f"{call} was not answered in full before its deadline"
        if timeout_s is None:
            return (
                f"{call} was not answered in full within the deadline that {self.address} gives to calls without one "
                "(`server.default_deadline_s`)"
            )
        return (
            f"{call} was not answered in full by {self.address} within its deadline of {timeout_s:g} s; "
            "raise `timeout_s` (--timeout-s) if the server is only slow"
        )
