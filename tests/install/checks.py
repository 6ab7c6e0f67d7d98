"""Uses each extra once, in the environment of this interpreter.

python -m tests.install.checks ENGINE|NONE EXTRA ...

`NONE` runs the checks that need no engine, and `ENGINE` those that need a server. Prints a line for each check; if this
machine can't do one, the line starts with `skipped:` and gives the reason. The exit status is 1 after the first check
that fails.
`python -m tests.install.matrix` runs this in clean environments.
"""

from __future__ import annotations

import contextlib
import http.server
import importlib
import importlib.util
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0
_DEMO_TIMEOUT_S = 900.0
PROMPT = [1 + number % 500 for number in range(1500)]
_TRACE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 8, "hash_ids": [1, 2]},
    {"timestamp": 9, "input_length": 1024, "output_length": 8, "hash_ids": [1, 3]},
]


class Skipped(Exception):
    """This machine can't do the check; the message says why."""


def radixkv(*arguments: str) -> str:
    """Run the command that pip has installed next to this interpreter; return its output."""
    command = [str(Path(sys.executable).with_name("radixkv")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    expect(done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(condition: bool, message: str) -> None:
    """Fail the check with a message unless a condition is true. Python's own assert could be switched off."""
    if not condition:
        raise AssertionError(message)


@contextlib.contextmanager
def serving(*settings: str) -> Iterator[str]:
    """Serve the embedded model; yields the address. After the block, SIGTERM must end the server with exit status 0."""
    from bench.parts.server_process import ServerProcess, serve_command

    server = ServerProcess(serve_command("tiny", "cpu", settings), start_timeout_s=PATIENCE_S, stop_timeout_s=120)
    with server as address:
        yield address
        status = server.stop()
        expect(status == 0, f"server: expected the exit status 0 after SIGTERM, got {status}")


def write_trace(folder: Path) -> str:
    """Write a trace of two requests; return its path."""
    file = folder / "trace.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in _TRACE))
    return str(file)


def base(folder: Path) -> None:
    """Check the command, planning, simulation and a client's call, which need no extra."""
    import grpc

    from radixkv import __version__
    from radixkv.service.client import Client
    from radixkv.v1 import prefill_pb2, prefill_pb2_grpc

    expect(radixkv("--version") == f"radixkv {__version__}\n", "another version is installed")
    plan = json.loads(radixkv("plan", "--model", "tiny", "--context", "8Ki", "--memory-gb", "1", "--json"))
    expect(bool(plan), "plan: nothing was printed")
    (result,) = json.loads(
        radixkv("simulate", write_trace(folder), "--capacity-tokens", "1M", "--policy", "lru", "--json"),
    )
    expect(result["cached_tokens"] == 512, f"simulate: expected 512 cached tokens, got {result}")

    class FakePrefill(prefill_pb2_grpc.PrefillServiceServicer):
        def Prefill(self, request: Any, context: object) -> Any:  # noqa: N802
            usage = prefill_pb2.Usage(prompt_tokens=len(request.token_ids))
            return prefill_pb2.PrefillResponse(next_token_id=7, usage=usage)

    server = grpc.server(futures.ThreadPoolExecutor(1))
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(FakePrefill(), server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with Client(address, timeout_s=PATIENCE_S) as client:
            expect(client.prefill(PROMPT).usage.prompt_tokens == len(PROMPT), "client: got another answer")
        expect("7" in radixkv("prefill", "--address", address, "--tokens", "1,2,3"), "prefill: got another answer")
    finally:
        server.stop(None).wait()


def engine(folder: Path) -> None:
    """Check a server: a hit, text, a chat, health, reflection, metrics, and its end."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    from radixkv.service.client import Client

    metrics_port = free_port()
    with serving(f"server.metrics_port={metrics_port}") as address:
        with Client(address, timeout_s=PATIENCE_S) as client:
            first, second = (client.prefill(PROMPT) for _ in range(2))
            expect(first.next_token_id == second.next_token_id, "a hit changed the answer")
            expect(second.usage.cached_tokens > 0, f"expected cached tokens, got {second.usage}")
        for options in ((), ("--chat",)):
            output = radixkv("generate", "--address", address, "--text", "It was a", "--max-new-tokens", "4", *options)
            expect(bool(output.strip()), "generate: got no text")
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            response = health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            expect(response.status == health_pb2.HealthCheckResponse.SERVING, f"health: got {response}")
            if hasattr(health, "List"):  # since grpcio-health-checking 1.85
                statuses = health.List(health_pb2.HealthListRequest(), timeout=PATIENCE_S).statuses
                expect("radixkv.v1.PrefillService" in statuses, f"health: got the services {sorted(statuses)}")
            reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            names = {each.name for each in next(reflect(iter([request]))).list_services_response.service}
            expect({"radixkv.v1.PrefillService", "grpc.health.v1.Health"} <= names, f"reflection: got {names}")
        for path in ("readyz", "metrics"):
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/{path}", timeout=PATIENCE_S) as page:
                expect(page.status == 200, f"/{path}: got {page.status}")


def text(folder: Path) -> None:
    """Check a tokenizer and its chat template, from files."""
    import tokenizers

    from radixkv.service.text.tokenizer import Tokenizer

    words = ["hello", "there", "user", "[UNK]"]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    writer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    writer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    writer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }} {{ message.content }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(folder)
    expect(tokenizer.encode("hello there") == [0, 1], "text: got another encoding")
    expect(tokenizer.decode([0, 1]) == "hello there", "text: got another decoding")
    expect(tokenizer.encode_chat([{"role": "user", "content": "hello"}]) == [2, 0], "chat: got another encoding")


def text_served(folder: Path) -> None:
    """Check that a command gets the tokenizer from the server."""
    with serving() as address:
        output = radixkv("prefill", "--address", address, "--text", "It was a", "--json")
        expect(json.loads(output)["usage"]["prompt_tokens"] > 1, f"prefill --text: got {output}")


def gguf(folder: Path) -> None:
    """Check the plan for a small GGUF file."""
    import numpy as np
    from gguf import GGUFWriter

    file = folder / "model.gguf"
    writer = GGUFWriter(file, "llama")
    size_keys = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
    for key in size_keys:
        writer.add_uint32(f"llama.{key}", 8)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((16, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plan = json.loads(radixkv("plan", "--model", str(file), "--context", "8", "--memory-gb", "1", "--json"))
    expected_token_bytes = 8 * 2 * 8 * 4  # 8 layers, each with a K and a V of 8 values of 4 bytes
    expect(plan["token_bytes"] == expected_token_bytes, f"plan: got {plan}")


def gguf_served(folder: Path) -> None:
    """Check that a GGUF file with quantized weights is converted into a model directory."""
    from tests.model_files.gguf_models import random_model, write_gguf

    file = write_gguf(folder / "model.gguf", random_model("qwen2"), "qwen2", "Q8_0")
    radixkv("convert", str(file), str(folder / "model"))
    expect((folder / "model" / "model.safetensors").is_file(), "convert: expected safetensors, got none")


def http_api(folder: Path) -> None:
    """Check a chat over HTTP, and what it reuses the second time."""
    port = free_port()
    body = json.dumps({"messages": [{"role": "user", "content": "It was a"}], "max_completion_tokens": 4}).encode()
    with serving(f"server.http_port={port}"):
        for is_cached in (False, True):
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            with urllib.request.urlopen(url, body, timeout=PATIENCE_S) as response:
                usage = json.load(response)["usage"]
            expect((usage["prompt_tokens_details"]["cached_tokens"] > 0) is is_cached, f"http: got {usage}")


def structured(folder: Path) -> None:
    """Check an answer that follows a JSON schema."""
    from radixkv.service.client import Client

    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    with serving() as address, Client(address, timeout_s=PATIENCE_S) as client:
        tokenizer = client.tokenizer()
        prompt = tokenizer.encode("It was a")
        responses = client.generate(prompt, json_schema=json.dumps(schema), max_new_tokens=200, timeout_s=PATIENCE_S)
        answer = tokenizer.decode([token_id for response in responses for token_id in response.token_ids])
        expect(json.loads(answer)["a"] in (1, 2), f"structured: got {answer!r}")


def events(folder: Path) -> None:
    """Check that a subscriber of the ZMQ socket sees blocks that are stored."""
    import msgpack
    import zmq

    from radixkv.service.client import Client

    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with (
        serving(f"events.zmq_endpoint={endpoint}") as address,
        Client(address, timeout_s=PATIENCE_S) as client,
        zmq.Context() as context,
        context.socket(zmq.SUB) as subscriber,
    ):
        subscriber.setsockopt(zmq.RCVTIMEO, 1000)
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        # Several prompts, because a PUB socket drops what it sends before a subscription has arrived.
        for first_token_id in range(1, 100):
            client.prefill([first_token_id, *PROMPT])
            with contextlib.suppress(zmq.Again):
                *_, payload = subscriber.recv_multipart()
                expect(b"BlockStored" in payload and bool(msgpack.unpackb(payload)), f"events: got {payload[:99]!r}")
                return
    raise AssertionError("events: expected a message, got none")


def redis(folder: Path) -> None:
    """Check that a second server finds in Redis, or Valkey, what the first one has computed."""
    from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server

    if SERVER is None:
        raise Skipped(WHY_NOT)
    with redis_server(folder) as store:
        secret = folder / "store.secret"
        secret.write_text(os.urandom(32).hex())
        settings = (f"tiers.redis_url={store.url}", f"tiers.secret_file={secret}")
        _check_reuse_after_restart(*settings, usage_field="remote_tokens")


def encryption(folder: Path) -> None:
    """Check that a server reads encrypted blocks again after a restart."""
    key = folder / "store.key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    settings = (f"tiers.disk_path={folder / 'disk'}", "tiers.disk_bytes=100000000", f"tiers.encryption_key_file={key}")
    _check_reuse_after_restart(*settings, usage_field="disk_tokens")


def mooncake(folder: Path) -> None:
    """Check that a second server finds in Mooncake what the first one has computed."""
    from tests.offload.tiers.mooncake_master import WHY_NOT, mooncake_master

    if WHY_NOT is not None:
        raise Skipped(WHY_NOT)
    with mooncake_master(free_port()) as master:
        settings = (f"tiers.mooncake_master={master}", "tiers.trusted=true")
        # The store loses the memory that a server contributes when the server ends, so both run at the same time.
        with serving(*settings) as first, serving(*settings) as second:
            answers = [_answer_after_saving(first), _answer_after_saving(second)]
    expect(answers[1].usage.remote_tokens > 0, f"remote_tokens: expected some, got {answers[1].usage}")


def tracing(folder: Path) -> None:
    """Check that the span of a request reaches an OpenTelemetry collector."""
    from radixkv.service.client import Client

    received: queue.Queue[bytes] = queue.Queue()

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            """Print nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        with serving(f"telemetry.otlp_endpoint={endpoint}") as address:
            with Client(address, timeout_s=PATIENCE_S) as client:
                client.prefill(PROMPT)
            expect(b"radixkv" in received.get(timeout=PATIENCE_S), "tracing: got other spans")
    finally:
        server.shutdown()


def plot(folder: Path) -> None:
    """Check the picture of a simulation."""
    picture = folder / "hits.png"
    radixkv("simulate", write_trace(folder), "--capacity-tokens", "1k,2k", "--policy", "lru", "--plot", str(picture))
    expect(picture.read_bytes().startswith(b"\x89PNG"), "simulate --plot: no picture was written")


def gateway(folder: Path) -> None:
    """Check OpenAI's API through the gateway: the demo."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Skipped("the SMG gateway has packages for Linux on x86-64 only")
    _run_module("bench.gateway_demo")


def ray(folder: Path) -> None:
    """Check a fleet on Ray: the demo."""
    _run_module("bench.fleet.demo")


def cuda(folder: Path) -> None:
    """Check that Triton can be imported; kernels need a GPU."""
    importlib.import_module("triton")
    _require_gpu("kernels in Triton")


def flashinfer(folder: Path) -> None:
    """Check that FlashInfer is installed, and on a GPU that it can be imported: without CUDA its import fails."""
    expect(importlib.util.find_spec("flashinfer") is not None, "flashinfer: the package is missing")
    _require_gpu("FlashInfer's kernels")
    importlib.import_module("flashinfer")


def _require_gpu(subject: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise Skipped(f"{subject}: there is no GPU; `make gpu` runs them on one")


def _check_reuse_after_restart(*settings: str, usage_field: str) -> None:
    """Check that a second server reuses, from a tier, what a first one has computed.

    Args:
        settings: of both servers.
        usage_field: the field of `usage` that counts tokens from this tier.
    """
    from radixkv.service.client import Client

    answers = []
    for _ in range(2):  # a server saves its cache as it ends
        with serving(*settings) as address, Client(address, timeout_s=PATIENCE_S) as client:
            answers.append(client.prefill(PROMPT))
    expect(getattr(answers[1].usage, usage_field) > 0, f"{usage_field}: expected some, got {answers[1].usage}")
    expect(answers[0].next_token_id == answers[1].next_token_id, "a hit changed the answer")


def _answer_after_saving(address: str) -> Any:
    """Return the answer to the prompt as soon as the server has saved blocks to a tier, or has loaded some from it."""
    from radixkv.service.client import Client

    with Client(address, timeout_s=PATIENCE_S) as client:
        answer = client.prefill(PROMPT)
        end_s = time.monotonic() + PATIENCE_S
        while not any(tier.saved_blocks or tier.loaded_blocks for tier in client.stats().tiers):
            expect(time.monotonic() < end_s, "tiers: no block was saved")
            time.sleep(0.05)
    return answer


def _run_module(name: str) -> None:
    command = [sys.executable, "-m", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEMO_TIMEOUT_S, check=False)
    expect(done.returncode == 0, f"python -m {name}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def free_port() -> int:
    """Return a port that is free now."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


Check = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Checks:
    """Checks of one extra: `alone` runs without the engine, `served` where the engine is installed as well."""

    alone: Check | None = None
    served: Check | None = None


CHECKS = {
    "engine": Checks(served=engine),
    "cuda": Checks(served=cuda),
    "flashinfer": Checks(served=flashinfer),
    "tracing": Checks(served=tracing),
    "text": Checks(alone=text, served=text_served),
    "gguf": Checks(alone=gguf, served=gguf_served),
    "http": Checks(served=http_api),
    "events": Checks(served=events),
    "structured": Checks(served=structured),
    "gateway": Checks(served=gateway),
    "ray": Checks(served=ray),
    "redis": Checks(served=redis),
    "mooncake": Checks(served=mooncake),
    "encryption": Checks(served=encryption),
    "plot": Checks(alone=plot),
}


def main() -> int:
    """Run checks; see the module."""
    kind, *extras = sys.argv[1:]
    chosen: list[tuple[str, Check | None]] = [("base", base)] if kind == "NONE" else []
    chosen += [(name, CHECKS[name].alone if kind == "NONE" else CHECKS[name].served) for name in extras]
    for name, check in chosen:
        if check is None:
            continue
        with tempfile.TemporaryDirectory(prefix="radixkv-check-") as folder:
            try:
                check(Path(folder))
            except Skipped as reason:
                print(f"skipped: {name}: {reason}", flush=True)
            except Exception as error:  # noqa: BLE001 - whatever a broken environment raises
                traceback.print_exc()
                message = str(error).strip() or repr(error)
                print(f"failed: {name}: {message.splitlines()[0]}", flush=True)
                return 1
            else:
                print(f"ok: {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
