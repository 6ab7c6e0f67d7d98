"""The exceptions of both clients: their hierarchy, their fields, and the exception of each failure."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.server
import pickle
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from radixkv.service import client as client_package
from radixkv.service.client import (
    AsyncClient,
    Cancelled,
    Client,
    ConnectError,
    DeadlineExceeded,
    MessageTooLarge,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    Unimplemented,
    errors,
)
from radixkv.v1.prefill_pb2 import GenerateResponse, PrefillResponse
from radixkv.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from tests.patience import PATIENCE_S
from tests.service.server.auth.certificates import CredentialFiles

REASON = "token_ids: expected what the service expects, got something else"


class Refusing(PrefillServiceServicer):
    """Ends each call with the status that its tenant names; the salt of the request is the reason.

    The tenant `logits` gets a response of 5,000 bytes, and the tenant `late` one after the test. Without a tenant, the
    response is empty.
    """

    def __init__(self) -> None:
        self.test_has_ended = threading.Event()

    def Prefill(self, request: Any, context: Any) -> PrefillResponse:  # noqa: N802
        if request.tenant == "logits":
            return PrefillResponse(logits=b"\0" * 5_000)
        if request.tenant == "late":
            self.test_has_ended.wait()
        elif request.tenant:
            metadata = (("retry-after-ms", "250"), ("radixkv-cause", "hold_lease")) if request.salt == "full" else ()
            context.set_trailing_metadata(metadata)
            context.abort(grpc.StatusCode[request.tenant], request.salt)
        return PrefillResponse()

    def Generate(self, request: Any, context: Any) -> Iterator[GenerateResponse]:  # noqa: N802
        yield GenerateResponse(token_ids=[1])
        self.Prefill(request.prefill, context)


@contextlib.contextmanager
def served(credentials: grpc.ServerCredentials | None = None, *options: tuple[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the address of a server that refuses, and the server."""
    servicer, server = Refusing(), grpc.server(concurrent.futures.ThreadPoolExecutor(8), options=options)
    add_PrefillServiceServicer_to_server(servicer, server)
    port = (
        server.add_insecure_port("127.0.0.1:0")
        if credentials is None
        else server.add_secure_port("127.0.0.1:0", credentials)
    )
    server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        servicer.test_has_ended.set()
        server.stop(None).wait()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a server without TLS that refuses."""
    with served(None, ("grpc.max_receive_message_length", 1_000)) as (address, _):
        yield address


@pytest.fixture(scope="module")
def credential_files(tmp_path_factory: pytest.TempPathFactory) -> CredentialFiles:
    """The certificates and keys of the server and the clients."""
    return CredentialFiles(tmp_path_factory.mktemp("credential_files"))


@pytest.fixture(scope="module")
def tls_address(credential_files: CredentialFiles) -> Iterator[str]:
    """Address of a server with TLS."""
    with served(grpc.ssl_server_credentials([key_pair(credential_files)])) as (address, _):
        yield address


def key_pair(credential_files: CredentialFiles) -> tuple[bytes, bytes]:
    """Return the private key and the certificate chain of the server."""
    return (credential_files.folder / "server.key").read_bytes(), (credential_files.folder / "server.pem").read_bytes()


@pytest.fixture(scope="module")
def closed_address() -> str:
    """An address where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return "127.0.0.1:{}".format(*listener.getsockname()[1:])


def blocking_prefill(address: str, prompt: Any, options: dict[str, Any], access: dict[str, Any]) -> None:
    with Client(address, **{"timeout_s": PATIENCE_S, **access}) as client:
        client.prefill(prompt, **options)


def blocking_generate(address: str, prompt: Any, options: dict[str, Any], access: dict[str, Any]) -> None:
    with Client(address, **{"timeout_s": PATIENCE_S, **access}) as client:
        stream = client.generate(prompt, **options)
        assert [list(each.token_ids) for each in stream] == [[1]]


def awaited_prefill(address: str, prompt: Any, options: dict[str, Any], access: dict[str, Any]) -> None:
    async def call() -> None:
        async with AsyncClient(address, **{"timeout_s": PATIENCE_S, **access}) as client:
            await client.prefill(prompt, **options)

    asyncio.run(call())


def awaited_generate(address: str, prompt: Any, options: dict[str, Any], access: dict[str, Any]) -> None:
    async def call() -> None:
        async with AsyncClient(address, **{"timeout_s": PATIENCE_S, **access}) as client:
            assert [list(each.token_ids) async for each in client.generate(prompt, **options)] == [[1]]

    asyncio.run(call())


Call = Callable[[str, Any, dict[str, Any], dict[str, Any]], None]
CALLS = (blocking_prefill, blocking_generate, awaited_prefill, awaited_generate)
UNARY = (blocking_prefill, awaited_prefill)


def error_of(call: Call, address: str, prompt: Any = (1,), access: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the exception of a call that must fail."""
    with pytest.raises(ServiceError) as caught:
        call(address, prompt, options, access or {})
    return caught.value


def subclasses(kind: type[ServiceError]) -> list[type[ServiceError]]:
    return [each for child in kind.__subclasses__() for each in (child, *subclasses(child))]


@pytest.mark.parametrize(
    ("text", "root"),
    [(errors.__doc__, "ServiceError"), (client_package.__doc__, "ServiceError")],
    ids=["errors", "package"],
)
def test_the_docstrings_draw_the_whole_tree(text: str, root: str) -> None:
    drawn: dict[str, str] = {}
    path: list[str] = []
    for bars, name in re.findall(r"^    ([│├└─ ]*)([A-Z]\w+)(?= |$)", text, re.MULTILINE):
        if name == root:
            root_depth, path = len(bars) // 4, [root]
        elif path:
            depth = len(bars) // 4 - root_depth
            path = [*path[:depth], name]
            drawn[name] = path[depth - 1]
    assert drawn == {kind.__name__: kind.__base__.__name__ for kind in subclasses(ServiceError) if kind.__base__}


def test_every_exception_can_be_imported_from_the_package() -> None:
    assert {kind.__name__ for kind in (ServiceError, *subclasses(ServiceError))} <= set(client_package.__all__)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK])
def test_a_status_is_an_exception_with_the_reason_of_the_service(address: str, call: Call, code: Any) -> None:
    error = error_of(call, address, tenant=code.name, salt=REASON)
    assert (error.code(), error.details()) == (code, REASON)
    assert REASON in str(error)
    # The topmost class with this status; subclasses of it are raised for special causes only.
    classes = [kind for kind in subclasses(ServiceError) if kind.status is code and kind.__base__.status is not code]
    assert type(error) is (classes[0] if classes else ServiceError)
    assert (error.address, error.timeout_s) == (address, PATIENCE_S)
    assert error.call == ("Generate" if call in (blocking_generate, awaited_generate) else "Prefill")


@pytest.mark.parametrize("call", CALLS)
def test_a_full_service_says_when_to_try_again(address: str, call: Call) -> None:
    error = error_of(call, address, tenant="RESOURCE_EXHAUSTED", salt="full")
    assert type(error) is ResourceExhausted
    assert (error.retry_after_s, error.cause, str(error)) == (0.25, "hold_lease", "full; try again in 0.25 s")
    assert dict(error.trailing_metadata())["retry-after-ms"] == "250"


@pytest.mark.parametrize("call", CALLS)
def test_code_for_grpc_catches_the_exceptions_too(address: str, call: Call) -> None:
    error = error_of(call, address, tenant="NOT_FOUND", salt=REASON)
    for kind in (grpc.RpcError, grpc.aio.AioRpcError, grpc.Call):
        assert isinstance(error, kind)
    assert (error.retry_after_s, error.cause, error.__cause__) == (None, None, None)
    assert error.__suppress_context__, "gRPC's own exception is not in the traceback"


def test_an_exception_can_be_sent_to_another_process(address: str) -> None:
    for call in UNARY:
        error = error_of(call, address, tenant="RESOURCE_EXHAUSTED", salt="full")
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.code(), copy.details()) == (
            ResourceExhausted,
            str(error),
            error.code(),
            "full",
        )
        assert (copy.retry_after_s, copy.address) == (0.25, address)


@pytest.mark.parametrize("call", CALLS)
def test_an_address_where_no_server_listens_is_a_connect_error(closed_address: str, call: Call) -> None:
    error = error_of(call, closed_address)
    assert type(error) is ConnectError
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert str(error) == f"no server is listening at {closed_address}; is `radixkv serve` running there?"


@pytest.mark.parametrize("call", UNARY)
def test_an_http_port_is_a_connect_error(call: Call) -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        error = error_of(call, address)
        server.shutdown()
    assert type(error) is ConnectError
    assert str(error) == (
        f"{address} answers, but does not speak gRPC; is it an HTTP port, such as the server's metrics port?"
    )


@pytest.mark.parametrize("call", UNARY)
def test_tls_that_does_not_match_the_server_is_a_connect_error(
    address: str, tls_address: str, credential_files: CredentialFiles, call: Call
) -> None:
    ca, other_ca = credential_files.folder / "ca.pem", credential_files.folder / "client_ca.pem"
    cases = [
        (tls_address, None, "closed the connection; if the server uses TLS, connect with `tls_ca`"),
        (address, ca, "does not speak TLS; check the port, or connect without `tls_ca`"),
        (tls_address, other_ca, "is not signed by an authority in `tls_ca`"),
    ]
    for server_address, tls_ca, words in cases:
        error = error_of(call, server_address, access={"tls_ca": tls_ca})
        assert type(error) is ConnectError
        assert words in str(error)
        assert server_address in str(error)
    call(tls_address, (1,), {}, {"tls_ca": ca})  # the right credentials


@pytest.mark.parametrize("call", UNARY)
def test_a_certificate_for_another_name_is_a_connect_error(credential_files: CredentialFiles, call: Call) -> None:
    issued = credential_files.ca.issue_cert("kv.example.org")
    pair = issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes()
    with served(grpc.ssl_server_credentials([pair])) as (address, _):
        error = error_of(call, address, access={"tls_ca": credential_files.folder / "ca.pem"})
    assert (type(error), error.code()) == (ConnectError, grpc.StatusCode.UNAVAILABLE)
    assert str(error).startswith(f"the certificate of {address} is for another name; ")


@pytest.mark.parametrize("call", UNARY)
def test_a_client_without_a_required_certificate_gets_a_connect_error(
    credential_files: CredentialFiles, call: Call
) -> None:
    roots = (credential_files.folder / "client_ca.pem").read_bytes()
    with served(grpc.ssl_server_credentials([key_pair(credential_files)], roots, require_client_auth=True)) as (
        address,
        _,
    ):
        error = error_of(call, address, access={"tls_ca": credential_files.folder / "ca.pem"})
    assert type(error) is ConnectError
    assert str(error).startswith(f"{address} closed the TLS connection; the server may require a certificate (")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An HTTP proxy that refuses all connections."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            self.send_error(403)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://user:secret@127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.mark.parametrize("call", UNARY)
@pytest.mark.usefixtures("proxy")
def test_the_proxy_in_use_is_named_without_its_password(call: Call) -> None:
    error = error_of(call, "kv.invalid:50051")
    assert type(error) is ConnectError
    assert "no connection to kv.invalid:50051 through the HTTP proxy that the environment variable http_proxy" in str(
        error
    )
    assert "no_proxy" in str(error)
    assert "secret" not in str(error)


@pytest.mark.parametrize("call", UNARY)
@pytest.mark.usefixtures("proxy")
def test_a_service_on_this_machine_is_called_without_a_proxy(address: str, call: Call) -> None:
    call(address, (1,), {}, {})
    with pytest.raises(ConnectError, match="through the HTTP proxy"):
        call(address, (1,), {}, {"options": [("grpc.enable_http_proxy", 1)]})


@pytest.mark.parametrize("call", UNARY)
def test_an_error_for_a_too_large_message_names_the_limit(address: str, call: Call) -> None:
    for prompt, options, access, words in (
        (
            [1] * 1_000,
            {},
            {},
            rf"the request has 4,\d+ bytes, more than the 1,000 that {address} accepts; .*"
            r"`server\.max_message_bytes`",
        ),
        (
            [1],
            {"tenant": "logits"},
            {"options": [("grpc.max_receive_message_length", 2_000)]},
            r"the response has 5,\d+ bytes, more than the 2,000 that this client accepts; .*`grpc\.max_receive_message",
        ),
        (
            [1] * 100,
            {},
            {"options": [("grpc.max_send_message_length", 300)]},
            r"the request has 4\d\d bytes, more than the 300 that this client sends; .*`grpc\.max_send_message_length`",
        ),
    ):
        error = error_of(call, address, prompt, access, **options)
        assert (type(error), error.code()) == (MessageTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert re.match(words, str(error)), str(error)
        assert error.retry_after_s is None


@pytest.mark.parametrize("call", CALLS)
def test_a_deadline_says_what_was_late_and_after_what_time(address: str, call: Call) -> None:
    error = error_of(call, address, access={"timeout_s": 0.5}, tenant="late")
    assert (type(error), error.code(), error.timeout_s) == (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED, 0.5)
    assert str(error).startswith(f"{error.call} was not answered in full by {address} within its deadline of 0.5 s; ")


def test_a_call_that_the_server_does_not_offer_is_unimplemented(address: str) -> None:
    with Client(address, timeout_s=PATIENCE_S) as client, pytest.raises(Unimplemented) as caught:
        client.stats()
    assert str(caught.value).startswith(f"the service at {address} does not offer Stats: ")


@pytest.mark.parametrize("call", [blocking_generate, awaited_generate])
def test_a_server_that_stops_in_the_middle_of_an_answer_is_unavailable(call: Call) -> None:
    with served() as (address, server):
        options = {"tenant": "late"}
        threading.Timer(0.5, server.stop, (None,)).start()
        error = error_of(call, address, **options)
    assert type(error) in (Unavailable, ConnectError), "ConnectError if the server stopped before the call began"
    assert address in str(error)


def test_a_stream_whose_client_another_thread_closes_is_cancelled(address: str) -> None:
    client = Client(address, timeout_s=PATIENCE_S)
    stream = client.generate([1], tenant="late")
    assert next(stream).token_ids == [1]
    threading.Timer(0.1, client.close).start()
    with pytest.raises(Cancelled, match=r"^Generate was cancelled, because this program"):
        next(stream)


@pytest.mark.parametrize("is_awaited", [False, True])
def test_a_closed_client_makes_no_calls(address: str, is_awaited: bool) -> None:
    async def awaited_call() -> None:
        client = AsyncClient(address)
        await client.close()
        await client.prefill([1])

    def call() -> None:
        if is_awaited:
            asyncio.run(awaited_call())
            return
        client = Client(address)
        client.close()
        client.prefill([1])

    with pytest.raises(ValueError, match=r"^client: it has been closed; make another one$"):
        call()


def test_a_missing_file_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Client("127.0.0.1:1", tls_ca=tmp_path / "none.pem")


@pytest.mark.parametrize("call", CALLS)
def test_a_prompt_of_text_fails_alike_while_its_tokenizer_is_fetched(
    closed_address: str, address: str, call: Call
) -> None:
    assert type(error_of(call, closed_address, "Hello")) is ConnectError
    error = error_of(call, address, "Hello")
    assert (type(error), error.call) == (Unimplemented, "GetTokenizer")
