"""Interpretation of gRPC's error texts, in versions 1.76 and 1.85."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from radixkv.service.client import errors
from radixkv.service.client.diagnosis import Diagnosis

C = grpc.StatusCode
FAILED = "failed to connect to all addresses; last error: "
HANDSHAKE = "handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1:SSL routines:OPENSSL_internal:"


def explain(code: grpc.StatusCode, details: str | None, timeout_s: float | None = 5.0, **facts: object) -> tuple:
    """Return the class and the text of the exception for a failed Prefill; `facts` are facts about the connection."""
    diagnosis = Diagnosis("kv:50051", **facts)  # type: ignore[arg-type]
    error = diagnosis.error_of(grpc.aio.AioRpcError(code, details=details), "Prefill", timeout_s)
    assert isinstance(error, errors.ServiceError)
    assert "\n" not in str(error)
    return type(error), str(error)


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Failed to connect to remote host: Connection refused", "no server is"),
        (
            f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Failed to connect to remote host: connect: Connection refused (111)",
            "no server is listening at kv:50051; is `radixkv serve` running there?",
        ),
        (f"{FAILED}UNKNOWN: unix:/run/kv: connect: No such file or directory (2)", "no server is listening"),
        (f"{FAILED}UNAVAILABLE: ipv4:10.0.0.1:1: Failed parsing HTTP/2", "does not speak gRPC"),
        (
            f"{FAILED}UNAVAILABLE: ipv4:10.0.0.1:1: Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame)",
            "does not speak gRPC",
        ),
        (f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Ssl {HANDSHAKE}WRONG_VERSION_NUMBER: Invalid", "does not speak TLS"),
        (f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Tls {HANDSHAKE}CERTIFICATE_VERIFY_FAILED: unable to get", "not signed by"),
        (
            f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Tls {HANDSHAKE}CERTIFICATE_VERIFY_FAILED: certificate has expired",
            "has expired or is not valid yet",
        ),
        (f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Tls {HANDSHAKE}NO_SHARED_CIPHER: OK", "no TLS connection to kv:50051"),
        (
            f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Custom verification check failed with error: UNAUTHENTICATED: "
            "Hostname Verification Check failed.",
            "is for another name",
        ),
        (f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Peer name kv is not in peer certificate", "is for another name"),
        ("DNS resolution failed for kv:50051: C-ares status is not ARES_SUCCESS: Domain name not found", "name of kv"),
        ("errors resolving kv:50051: [field:hostname lookup error: Domain name not found]", "(Domain name not found)"),
        (
            f"{FAILED}UNKNOWN: ipv4:10.0.0.1:1: Failed to connect to remote host: Network is unreachable",
            "no connection to kv:50051: Failed to connect to remote host: Network is unreachable",
        ),
        (
            f"{FAILED}something that no version says yet",
            "kv:50051: something that no version says yet",
        ),
    ],
)
def test_a_connection_that_cannot_be_made_is_explained(details: str, words: str) -> None:
    error_type, text = explain(C.UNAVAILABLE, details)
    assert error_type is errors.ConnectError
    assert words in text


@pytest.mark.parametrize("details", ["Socket closed", "recvmsg:Connection reset by peer (104)"])
def test_a_connection_that_is_closed_at_once_is_explained_by_tls(details: str) -> None:
    for facts, words in (
        ({}, "if the server uses TLS, connect with `tls_ca` (--tls-ca)"),
        ({"has_tls": True}, "the server may require a certificate"),
        ({"has_tls": True, "has_certificate": True}, "does the server trust the authority that signed `certificate`?"),
    ):
        error_type, text = explain(C.UNAVAILABLE, f"{FAILED}UNAVAILABLE: ipv4:10.0.0.1:1: {details}", **facts)
        assert error_type is errors.ConnectError
        assert words in text


@pytest.mark.parametrize(
    ("code", "details", "kind", "words"),
    [
        (C.UNAVAILABLE, "Socket closed", errors.Unavailable, "the connection to kv:50051 ended before Prefill was"),
        (C.UNAVAILABLE, "Stream removed (Socket closed)", errors.Unavailable, "ended before Prefill was answered"),
        (C.UNAVAILABLE, "recvmsg:Connection reset by peer", errors.Unavailable, "ended before Prefill was answered"),
        (C.UNAVAILABLE, "Cancelling all calls", errors.Unavailable, "ended before Prefill was answered"),
        (C.UNAVAILABLE, "GOAWAY received; Error code: 2; Debug Text: x", errors.Unavailable, "ended before Prefill"),
        (C.UNAVAILABLE, "keepalive watchdog timeout", errors.Unavailable, "ended before Prefill was answered"),
        (
            C.INTERNAL,
            "Received RST_STREAM with error code 2",
            errors.InternalError,
            "ended before Prefill was answered",
        ),
        (
            C.UNAVAILABLE,
            "Received http2 header with status: 502",
            errors.Unavailable,
            "HTTP status 502 instead of",
        ),
        (C.UNKNOWN, "No status received", errors.ServiceError, "answers, but not as a gRPC service"),
        (C.UNIMPLEMENTED, "Method not found!", errors.Unimplemented, "does not offer Prefill"),
        (C.UNIMPLEMENTED, "events: expected to be on, got off", errors.Unimplemented, "events: expected to be on, got"),
        (C.UNAUTHENTICATED, "call host does not match SSL server name", errors.ConnectError, "is for another name"),
        (C.UNAVAILABLE, "service: shutting down", errors.Unavailable, "service: shutting down"),
        (
            C.UNAVAILABLE,
            "nothing that is known",
            errors.Unavailable,
            "Prefill failed at kv:50051: nothing that",
        ),
        (C.UNKNOWN, "boom", errors.ServiceError, "Prefill failed at kv:50051: boom"),
        (C.INTERNAL, None, errors.InternalError, "Prefill failed at kv:50051 without a reason"),
        (C.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceeded, "within its deadline of 5 s"),
        (C.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)", errors.DeadlineExceeded, "its deadline of 5 s"),
        (C.DEADLINE_EXCEEDED, "deadline: passed before the answer was known", errors.DeadlineExceeded, "deadline of 5"),
        (C.DEADLINE_EXCEEDED, "message: only a part arrived", errors.DeadlineExceeded, "message: only a part"),
        (
            C.RESOURCE_EXHAUSTED,
            "Stream removed (CLIENT: Received message larger than max (10485765 vs. 4194304))",
            errors.MessageTooLarge,
            "the response has 10,485,765 bytes, more than the 4,194,304 that this client accepts",
        ),
        (
            C.RESOURCE_EXHAUSTED,
            "SERVER: Received message larger than max (5000000 vs. 4194304)",
            errors.MessageTooLarge,
            "the request has 5,000,000 bytes, more than the 4,194,304 that kv:50051 accepts",
        ),
    ],
)
def test_a_failed_call_is_explained(code: grpc.StatusCode, details: str | None, kind: type, words: str) -> None:
    error_type, text = explain(code, details)
    assert error_type is kind
    assert words in text


def test_a_deadline_that_the_service_sets_is_named() -> None:
    _, text = explain(C.DEADLINE_EXCEEDED, "deadline: passed before the answer was known", timeout_s=None)
    assert "the deadline that kv:50051 gives to calls without one (`server.default_deadline_s`)" in text


def test_an_error_that_is_explained_or_has_no_status_stays_what_it_is() -> None:
    for error in (errors.NotFound("gone"), grpc.RpcError("of another library")):
        assert Diagnosis("kv:50051").error_of(error, "Prefill", None) is error
