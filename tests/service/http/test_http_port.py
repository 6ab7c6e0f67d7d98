"""The HTTP port around a fake engine: credentials, limits, clients that are slow or disconnect, and draining."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import radixkv.service.http.connections as connections_module
import radixkv.service.server.auth.revocation as revocation_module
from radixkv.errors import ConfigError, DeadlinePassed, InvalidCredential, InvalidRequest, NotPermitted, QueueFull
from radixkv.service.text.tokenizer import Tokenizer
from tests.free_port import free_port
from tests.patience import PATIENCE_S
from tests.reference_cycles import uncollected
from tests.service.fake_engine import FakeEngine
from tests.service.serving import becomes_true, serving

TOKENS = """
[[credentials]]
name = "one"
token_sha256 = "{one}"
tenant = "a"

[[credentials]]
name = "router"
token_sha256 = "{router}"
role = "router"
tenants = ["a", "b"]

[[credentials]]
name = "reader"
token_sha256 = "{reader}"
role = "reader"
"""


def token_hashes(*names: str) -> dict[str, str]:
    """Return the SHA-256 hashes of the tokens `NAME-token`, by name."""
    return {name: sha256(f"{name}-token".encode()).hexdigest() for name in names}


def request_bytes(body: object, path: str = "/v1/completions", **headers: str) -> bytes:
    """Return a POST request as HTTP/1.1 writes it. In the names of headers, an underscore stands for a hyphen."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", f"content-length: {len(data)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def response_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read a response; return its status, its headers with names in lower case, and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:]) if name}
    if headers.get("transfer-encoding") == "chunked":
        pieces = []
        while size := int(await reader.readline(), 16):
            pieces.append(await reader.readexactly(size))
            await reader.readline()
        await reader.readline()
        return int(head[0].split()[1]), headers, b"".join(pieces)
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


@contextlib.asynccontextmanager
async def port_of(engine: FakeEngine, **config: Any) -> AsyncIterator[tuple[Any, int]]:
    """Yield a server and its HTTP port."""
    async with serving(engine, model_path="tiny", http_port=0, **config) as (server, _):
        yield server, int(server.http_address.rpartition(":")[2])


async def call(port: int, body: object, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
    """Send a request on a connection of its own; return the status and the JSON of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes(body, path, **headers))
        status, _, data = await response_of(reader)
    finally:
        writer.close()
    return status, json.loads(data)


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


BODY = {"prompt": [5, 6, 7], "max_tokens": 4}


def test_a_credential_determines_the_tenant(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS.format(**token_hashes("one", "router", "reader")))

    async def main() -> list[tuple[int, str]]:
        async with port_of(engine, tokens_file=str(tokens), insecure=True) as (_, port):
            calls = [
                {},
                {"authorization": "Bearer other"},
                {"authorization": "Bearer reader-token"},
                {"authorization": "Bearer one-token"},
                {"authorization": "Bearer one-token", "radixkv_tenant": "b"},
                {"authorization": "Bearer router-token", "radixkv_tenant": "b"},
                {"authorization": "Bearer router-token", "radixkv_tenant": "c"},
            ]
            responses = [await call(port, BODY, **headers) for headers in calls]
        return [(status, answer["error"]["type"] if status != 200 else "") for status, answer in responses]

    engine = FakeEngine()
    assert run(main()) == [
        (401, "authentication_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (200, ""),
        (403, "permission_error"),
        (200, ""),
        (403, "permission_error"),
    ]
    assert [params.caller.tenant for params in engine.params] == ["a", "b"]


def test_the_fields_of_a_request_reach_the_engine() -> None:
    async def main() -> None:
        async with port_of(engine) as (_, port):
            body = {**BODY, "cache_salt": "s", "prompt_cache_retention": "24h", "seed": -1, "user": "u"}
            assert (await call(port, body, x_request_id="mine"))[0] == 200

    engine = FakeEngine()
    run(main())
    (params,), (sampling,) = engine.params, engine.samplings
    assert (params.caller.salt, params.request_id) == ("s", "mine")
    assert (params.retention.priority, params.retention.ttl_s) == (75, 86400)
    assert (sampling.seed, sampling.temperature, sampling.max_new_tokens) == (2**64 - 1, 1.0, 4)


def test_a_client_that_leaves_cancels_its_request() -> None:
    async def main() -> None:
        async with port_of(engine) as (server, port):
            for is_streamed in (False, True):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request_bytes({**BODY, "stream": is_streamed}))
                assert await becomes_true(lambda count=1 + is_streamed: len(engine.futures) == count)
                writer.close()
                assert await becomes_true(engine.futures[-1].cancelled)
            assert await becomes_true(lambda: server.receiver.num_calls == 0)
            assert server.receiver.held_bytes.used == 0

    engine = FakeEngine(is_gated=True)
    run(main())


def test_a_refusal_says_when_to_try_again() -> None:
    async def main() -> tuple[int, dict[str, str], bytes]:
        async with port_of(engine) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes({**BODY, "stream": True}))
            try:
                return await response_of(reader)
            finally:
                writer.close()

    engine = FakeEngine()
    engine.refusal = QueueFull("queue: full", retry_after_s=1.5)
    status, headers, body = run(main())
    assert (status, headers["retry-after"], headers["retry-after-ms"]) == (429, "2", "1500")
    assert json.loads(body)["error"]["type"] == "rate_limit_error"


def test_an_unexpected_failure_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> tuple[int, Any]:
        async with port_of(engine) as (_, port):
            return await call(port, BODY)

    engine = FakeEngine()
    engine.failure = RuntimeError("a secret")
    status, answer = run(main())
    assert (status, answer["error"]["message"]) == (500, "internal error; the server's log has the cause")
    assert "a secret" in caplog.text


def test_several_requests_share_a_connection() -> None:
    async def main() -> list[int]:
        async with port_of(FakeEngine()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            statuses = []
            for body in (BODY, {}, BODY):
                writer.write(request_bytes(body))
                statuses.append((await response_of(reader))[0])
            writer.close()
            return statuses

    assert run(main()) == [200, 400, 200]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: loc"])
def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections_module, "_IDLE_POLL_S", 0.01)

    async def main() -> bytes:
        async with port_of(FakeEngine(), receive_timeout_s=0.1) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            try:
                return await reader.read()
            except ConnectionResetError:
                return b""
            finally:
                writer.close()

    assert run(main()) == b""


def test_a_body_that_does_not_arrive_is_refused() -> None:
    async def main() -> tuple[int, bytes]:
        async with port_of(FakeEngine(), receive_timeout_s=0.1) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(BODY)[:-5])
            status, _, data = await response_of(reader)
            writer.close()
            return status, data

    status, data = run(main())
    assert status == 504
    assert b"only a part of it arrived within 0.1 s" in data


def test_small_bodies_that_arrive_slowly_do_not_delay_others() -> None:
    async def main() -> list[int]:
        async with port_of(FakeEngine(), max_receiving_bytes=1) as (server, port):
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            for _, writer in slow:
                writer.write(request_bytes(BODY)[:-5])
            assert await becomes_true(lambda: server.receiver.num_calls == 8)
            statuses = [(await call(port, BODY))[0]]
            for reader, writer in slow:
                writer.write(request_bytes(BODY)[-5:])
                statuses.append((await response_of(reader))[0])
                writer.close()
            return statuses

    assert run(main()) == [200] * 9


def test_a_body_that_is_too_large_is_refused() -> None:
    async def main() -> list[tuple[int, str]]:
        async with port_of(FakeEngine(), max_message_bytes=1024) as (_, port):
            status, answer = await call(port, {"prompt": "a" * 2000})
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"800\r\n" + b"a" * 2048 + b"\r\n0\r\n\r\n")
            chunked_status, _, data = await response_of(reader)
            writer.close()
            chunked_answer = json.loads(data)
            return [(status, answer["error"]["message"]), (chunked_status, chunked_answer["error"]["message"])]

    (status, message), (chunked_status, chunked_message) = run(main())
    assert (status, chunked_status) == (413, 413)
    assert message.startswith("body: expected at most 1024 bytes, got 20")
    assert chunked_message == "body: expected at most 1024 bytes, got more"


def test_beyond_the_maximum_the_connection_that_was_idle_for_longest_is_closed() -> None:
    async def main() -> tuple[int, list[bool]]:
        async with port_of(engine, max_connections=3) as (_, port):
            busy = await asyncio.open_connection("127.0.0.1", port)
            busy[1].write(request_bytes(BODY))
            assert await becomes_true(lambda: bool(engine.futures))
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            await asyncio.gather(*(wait_for_end(reader) for reader, _ in idle[:2]))
            engine.open_gate()
            status, _, _ = await response_of(busy[0])
            are_open = [not reader.at_eof() for reader, _ in idle]
            for _, writer in (busy, *idle):
                writer.close()
            return status, are_open

    async def wait_for_end(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""

    engine = FakeEngine(is_gated=True)
    status, are_open = run(main())
    assert status == 200
    assert are_open[2:] == [True, True]  # `wait_for_end` has seen that the first two were closed


def test_a_client_that_reads_nothing_loses_its_connection() -> None:
    async def main() -> None:
        async with port_of(engine, send_timeout_s=0.2) as (server, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.transport.pause_reading()
            body = {"prompt": [5], "max_tokens": 3000, "stream": True, "n": 8, "logprobs": 20}
            writer.write(request_bytes(body))
            assert await becomes_true(lambda: bool(engine.futures))
            assert await becomes_true(lambda: server.receiver.num_calls == 0)
            assert server.receiver.held_bytes.used == 0
            writer.close()

    engine = FakeEngine()
    run(main())


def test_the_log_probabilities_of_many_tokens_are_sent_in_several_events() -> None:
    async def main() -> tuple[list[Any], Any]:
        async with port_of(engine) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.transport.pause_reading()
            writer.write(request_bytes({**body, "stream": True}))
            assert await becomes_true(lambda: bool(engine.futures) and engine.futures[0].done())
            writer.transport.resume_reading()
            _, _, data = await response_of(reader)
            writer.close()
            _, whole = await call(port, body)
        lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
        assert lines.pop() == b"[DONE]"
        return [json.loads(line)["choices"][0] for line in lines], whole["choices"][0]

    engine = FakeEngine()
    body = {"prompt": [5], "max_tokens": 4000, "logprobs": 20}
    events, whole = run(main())
    assert "".join(event["text"] for event in events) == whole["text"]
    for name, values in whole["logprobs"].items():
        assert [value for event in events for value in event["logprobs"][name]] == values
    assert max(len(event["logprobs"]["tokens"]) for event in events) * (20 + 1) <= 1024  # numbers per event
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["length"]


def test_headers_may_end_in_several_pieces() -> None:
    async def main() -> int:
        async with port_of(FakeEngine()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head, _, body = request_bytes({**BODY, "user": "u" * 100_000}).partition(b"\r\n\r\n")
            for piece in (head, b"\r", b"\n", b"\r", b"\n", body):
                writer.write(piece)
                await asyncio.sleep(0.05)  # so that the server reads each piece separately
            status, _, _ = await response_of(reader)
            writer.close()
            return status

    assert run(main()) == 200


def test_another_host_is_refused() -> None:
    async def main() -> bytes:
        async with port_of(FakeEngine()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(BODY).replace(b"host: localhost", b"host: evil.example"))
            line = await reader.readline()
            writer.close()
            return line

    assert run(main()).startswith(b"HTTP/1.1 421 ")


def test_health_follows_the_engine() -> None:
    async def main() -> list[int]:
        async with port_of(engine) as (_, port):
            statuses = []
            for is_healthy in (True, False):
                engine.is_healthy = is_healthy
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
                statuses.append((await response_of(reader))[0])
                writer.close()
            return statuses

    engine = FakeEngine()
    assert run(main()) == [200, 503]


def test_a_drain_lets_running_requests_finish() -> None:
    async def main() -> int:
        async with port_of(engine) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes(BODY))
            assert await becomes_true(lambda: bool(engine.futures))
            draining = asyncio.create_task(server.drain())
            await asyncio.sleep(0)
            engine.open_gate()
            status, _, _ = await response_of(reader)
            writer.close()
            await draining
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            return status

    engine = FakeEngine(is_gated=True)
    assert run(main()) == 200


MESSAGE = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
# The path and the body of a request for a stream, and what its last data contains if its deadline passes.
STREAMS = [
    ("/v1/completions", BODY, '"type":"server_error"'),
    ("/v1/chat/completions", MESSAGE, '"type":"server_error"'),
    ("/v1/responses", {"input": "a", "max_output_tokens": 4}, '"type":"error"'),
    ("/v1/messages", MESSAGE, '"type":"timeout_error"'),
]


# What a stream contains if it ended regularly.
ENDS = ("[DONE]", "message_stop", "response.completed", "response.incomplete")


@contextlib.asynccontextmanager
async def streaming(
    engine: FakeEngine, path: str, body: Any, **config: Any
) -> AsyncIterator[tuple[Any, asyncio.StreamReader]]:
    """Yield the server and the connection of a stream that has sent its first data, and waits at the gate."""
    async with port_of(engine, **config) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(request_bytes({**body, "stream": True}, path))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"data: ")
            yield server, reader
        finally:
            writer.close()


@pytest.mark.parametrize(("path", "body", "expected"), STREAMS)
def test_a_stream_whose_deadline_passes_ends_with_an_error(path: str, body: Any, expected: str) -> None:
    async def main() -> str:
        async with streaming(engine, path, body) as (_, reader):
            engine.failure = DeadlinePassed("deadline: passed after 600 s")
            engine.open_gate()
            return (await reader.readuntil(b"0\r\n\r\n")).decode()

    engine = FakeEngine(is_gated=True)
    data = run(main())
    last = [line for line in data.splitlines() if line.startswith("data: ")][-1]
    assert expected in last
    assert "deadline: passed after 600 s" in last
    assert not any(end in data for end in ENDS)


@pytest.mark.parametrize(("path", "body", "_"), STREAMS)
def test_a_drain_lets_a_stream_finish(path: str, body: Any, _: str) -> None:
    async def main() -> str:
        async with streaming(engine, path, body) as (server, reader):
            draining = asyncio.create_task(server.drain())
            assert await becomes_true(lambda: engine.is_draining)
            engine.open_gate()
            data = await reader.readuntil(b"0\r\n\r\n")
            assert await draining
            return data.decode()

    engine = FakeEngine(is_gated=True)
    data = run(main())
    assert any(end in data for end in ENDS)
    assert '"error":{' not in data


@pytest.mark.parametrize(("path", "body", "_"), STREAMS)
def test_a_drain_that_takes_too_long_ends_a_stream(path: str, body: Any, _: str) -> None:
    async def main() -> bytes:
        async with streaming(engine, path, body, drain_timeout_s=0.01) as (server, reader):
            draining = asyncio.create_task(server.drain())
            data = await reader.read()
            assert not await draining
            assert engine.futures[-1].cancelled()
            return data

    engine = FakeEngine(is_gated=True)
    assert b"[DONE]" not in run(main())


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "body",
    [
        BODY,
        {**BODY, "stream": True},
        {**BODY, "logprobs": 2, "n": 3},
        {"prompt": [[5], [6]], "max_tokens": 2},
        {"prompt": [[5], [6]], "max_tokens": 2, "user": "refused"},
        {"prompt": [5, 999]},
        {"prompt": 5},
        {"typo": 1},
        {**BODY, "model": "unknown"},
    ],
)
def test_requests_leave_no_reference_cycles(body: dict[str, Any]) -> None:
    engine = FakeEngine()
    if body.get("user") == "refused":
        engine.refusal = InvalidRequest("prompt: refused")

    async def main() -> list[Any]:
        async with port_of(engine) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):  # the first request loads the tokenizer
                with uncollected() as garbage:
                    writer.write(request_bytes(body))
                    await response_of(reader)
                    engine.futures.clear()
                    await asyncio.sleep(0.05)
            writer.close()
        return [each for each in garbage if type(each).__module__.startswith(("radixkv.", "aiohttp."))]

    assert run(main()) == []


def test_counting_the_tokens_of_an_empty_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode_rendered", lambda self, text: [])
    body = {"messages": [{"role": "user", "content": "x"}]}

    async def main() -> tuple[int, Any]:
        async with port_of(FakeEngine()) as (_, port):
            return await call(port, body, "/v1/messages/count_tokens")

    status, answer = run(main())
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["message"] == "messages: expected at least 1 token, got 0"


def test_requests_that_the_server_refuses_are_counted_and_invalid_ones_not(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS.format(**token_hashes("one", "router", "reader")))
    counted: list[type] = []

    async def main() -> list[int]:
        settings = {
            "tokens_file": str(tokens),
            "insecure": True,
            "count_refusal": lambda error: counted.append(type(error)),
        }
        async with port_of(FakeEngine(), **settings) as (_, port):
            one = {"authorization": "Bearer one-token"}
            calls: list[tuple[object, dict[str, str]]] = [
                (BODY, {}),
                (BODY, {**one, "radixkv_tenant": "b"}),
                ([], one),
                ({**BODY, "temperature": -1}, one),
                (BODY, one),
            ]
            return [(await call(port, body, **headers))[0] for body, headers in calls]

    assert run(main()) == [401, 403, 400, 400, 200]
    assert counted == [InvalidCredential, NotPermitted, InvalidRequest]


def test_headers_that_are_not_utf_8_cause_no_internal_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS.format(**token_hashes("one", "router", "reader")))

    async def main() -> list[int]:
        async with port_of(FakeEngine(), tokens_file=str(tokens), insecure=True) as (_, port):
            statuses = []
            for header_lines in (
                b"authorization: Bearer \xff",
                b"x-api-key: \xff",
                b"authorization: Bearer one-token\r\nradixkv-tenant: \xff",
                b"authorization: Bearer one-token\r\nx-request-id: \xff",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request_bytes(BODY).replace(b"host: localhost", b"host: localhost\r\n" + header_lines))
                statuses.append((await response_of(reader))[0])
                writer.close()
            return statuses

    assert run(main()) == [401, 401, 403, 200]
    assert "failed" not in caplog.text


NO_JSON = "body: expected JSON, got "  # for lone surrogates, and for numbers beyond 64-bit floats


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_salt": "\ud800"}, NO_JSON),
        ({"model": "\udc00"}, NO_JSON),
        ({"stop": ["\ud83d"]}, NO_JSON),
        ({"user": {"\ud800": 1}}, NO_JSON),
        ({"temperature": 10**400}, NO_JSON),
        ({"temperature": 10**30}, "temperature: expected a number from 0 to 2, got 1e+30"),
        ({"seed": 10**30}, "seed: expected an integer from"),
        ({"logit_bias": {"5": 10**30}}, "logit_bias.5: expected a number from -100 to 100, got 1e+30"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias: expected token ids as names, got another name"),
        ({"request_id": "a\r\nset-cookie: b"}, "request_id: expected printable characters"),
    ],
)
def test_hostile_values_are_refused(fields: dict[str, Any], message: str) -> None:
    async def main() -> tuple[int, Any]:
        async with port_of(FakeEngine()) as (_, port):
            return await call(port, {**BODY, **fields})

    status, answer = run(main())
    assert (status, answer["error"]["message"][: len(message)]) == (400, message)


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
ANTHROPIC_HEAD = b"POST /v1/messages HTTP/1.1\r\nhost: localhost\r\n"


def test_headers_that_are_too_large_together_are_refused() -> None:
    async def main() -> list[tuple[int, dict[str, str], bytes]]:
        async with port_of(FakeEngine()) as (_, port):
            responses = []
            for num_headers in (3, 5):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request_bytes(BODY))  # the second request of a connection has the same limit
                responses.append(await response_of(reader))
                writer.write(request_bytes(BODY, **{f"x{index}": "a" * 15_000 for index in range(num_headers)}))
                responses.append(await response_of(reader))
                writer.close()
            return responses

    responses = run(main())
    assert [status for status, _, _ in responses] == [200, 200, 200, 431]
    _, headers, data = responses[-1]
    assert json.loads(data)["error"]["message"].startswith("request: expected headers of at most 65536 bytes together")
    assert headers["x-request-id"] == headers["request-id"] != ""


def test_a_large_body_is_not_counted_as_headers() -> None:
    async def main() -> list[int]:
        async with port_of(FakeEngine()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            statuses = []
            for _ in range(2):
                writer.write(request_bytes({**BODY, "user": "a" * 300_000}))
                statuses.append((await response_of(reader))[0])
            writer.close()
            return statuses

    assert run(main()) == [200, 200]


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"\x16\x03\x01\x00\xff\r\n\r\n", 400, "request: expected HTTP/1.1"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "request: expected HTTP/1.1"),
        (HEAD + b"content-length: -1\r\n\r\n", 400, "request: expected HTTP/1.1"),
        (
            HEAD + b"x: " + b"a" * 20_000 + b"\r\n\r\n",
            400,
            "request: expected HTTP/1.1, with a request line and headers",
        ),
        (HEAD + b"expect: magic\r\ncontent-length: 2\r\n\r\n{}", 417, "POST /v1/completions: Expectation Failed"),
        (
            ANTHROPIC_HEAD + b"expect: magic\r\ncontent-length: 2\r\n\r\n{}",
            417,
            "POST /v1/messages: Expectation Failed",
        ),
        (HEAD.replace(b"completions", b"x") + b"expect: magic\r\n\r\n", 417, "POST /v1/x: Expectation Failed"),
    ],
)
def test_a_refusal_before_a_handler_runs_has_the_form_of_the_api(sent: bytes, status: int, message: str) -> None:
    async def main() -> tuple[int, dict[str, str], bytes]:
        async with port_of(FakeEngine()) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            try:
                return await response_of(reader)
            finally:
                writer.close()

    response_status, headers, data = run(main())
    body = json.loads(data)
    assert (response_status, body["error"]["message"][: len(message)]) == (status, message)
    assert body["error"]["type"] == "invalid_request_error"
    assert headers["content-type"].startswith("application/json")
    # Errors of Anthropic's API have a type at the top. What is not HTTP has no path, and gets the fields of both APIs.
    assert ("type" in body) == (status == 400 or b"/v1/messages" in sent)


def test_text_beyond_ascii_is_accepted() -> None:
    async def main() -> int:
        async with port_of(FakeEngine()) as (_, port):
            return (await call(port, {**BODY, "cache_salt": "\N{GRINNING FACE} é"}, x_request_id="ü"))[0]

    assert run(main()) == 200


def test_a_compressed_body_is_refused() -> None:
    async def main() -> tuple[int, Any]:
        async with port_of(FakeEngine()) as (_, port):
            return await call(port, BODY, content_encoding="gzip")

    status, answer = run(main())
    assert (status, answer["error"]["param"]) == (400, "content-encoding")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", BODY),
        ("/v1/messages", MESSAGE),
        ("/v1/responses", {"input": "a", "max_output_tokens": 20}),
    ],
)
def test_a_stream_whose_credential_is_revoked_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(revocation_module, "PERIOD_S", 0.01)
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS.format(**token_hashes("one", "router", "reader")))

    async def main() -> tuple[int, bytes]:
        async with port_of(engine, tokens_file=str(tokens), insecure=True) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes({**body, "stream": True}, path, authorization="Bearer one-token"))
            response = asyncio.create_task(response_of(reader))
            assert await becomes_true(lambda: bool(engine.futures))
            tokens.write_text(TOKENS.format(**{**token_hashes("router", "reader"), "one": "0" * 64}))
            status, _, data = await response
            assert await becomes_true(engine.futures[-1].cancelled)
            assert server.receiver.held_bytes.used == 0
            writer.write(request_bytes(body, path, authorization="Bearer one-token"))
            assert (await response_of(reader))[0] == 401  # the connection stays usable
            writer.close()
            return status, data

    engine = FakeEngine(is_gated=True)
    status, data = run(main())
    assert status == 200
    (error,) = [line for line in data.decode().splitlines() if '"error"' in line and '"error":null' not in line]
    assert "this service does not know the token" in error


def test_a_stream_ends_when_its_caller_may_no_longer_act_for_its_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocation_module, "PERIOD_S", 0.01)
    tokens = tmp_path / "tokens.toml"
    entries = TOKENS.format(**token_hashes("one", "router", "reader"))
    tokens.write_text(entries)
    refusals: list[type] = []

    async def main() -> bytes:
        settings = {
            "tokens_file": str(tokens),
            "insecure": True,
            "count_refusal": lambda error: refusals.append(type(error)),
        }
        async with port_of(engine, **settings) as (_, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            headers = {"authorization": "Bearer router-token", "radixkv_tenant": "b"}
            writer.write(request_bytes({**BODY, "stream": True}, **headers))
            response = asyncio.create_task(response_of(reader))
            assert await becomes_true(lambda: bool(engine.futures))
            tokens.write_text(entries.replace('tenants = ["a", "b"]', 'tenants = ["a"]'))
            _, _, data = await response
            assert await becomes_true(engine.futures[-1].cancelled)
            writer.close()
            return data

    engine = FakeEngine(is_gated=True)
    assert b"this credential may not act for the tenant" in run(main())
    assert refusals == [NotPermitted]


def test_a_port_in_use_is_reported() -> None:
    port = free_port()

    async def main() -> None:
        async with serving(FakeEngine(), http_port=port), serving(FakeEngine(), http_port=port):
            raise AssertionError("both servers listen on the same port")

    with pytest.raises(ConfigError, match=r"server\.host, server\.http_port: expected a free address"):
        run(main())
