"""Compares the HTTP APIs of radixkv and vLLM: chat completions of concurrent callers, with one model on one machine.

    python -m bench.http_calls --model DIR --json bench/results/http_calls.json

DIR is a checkpoint with a tokenizer and a chat template, which `radixkv convert` writes from a GGUF file. Both servers
run during the whole benchmark and are called in turn, in short rounds. All prompts begin with the same system message,
and end with different questions, so both servers reuse the system message. vLLM is installed once, in the folder
`--cache`. Each server computes with all cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.parts.peers.environments import RECIPES, Environments, NotInstalled
from bench.parts.peers.workers.http_engine import HttpEngine, free_port
from bench.parts.peers.workers.vllm_worker import vllm_variables
from bench.parts.report import distribution
from bench.parts.result_file import write_result
from bench.parts.server_process import serve_command
from radixkv.service.cli.argument_types import positive, positive_number

_VLLM_MODEL_NAME = "model"
_WARM_UP_S = 3.0  # maximum duration of a warm-up round
_SYSTEM = "You are a helpful assistant in a library. Answer in one short sentence. " * 20


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is measured.

    Attributes:
        name: name of the engine.
        url: URL of its chat completions.
        model: the field `model` of requests.
    """

    name: str
    url: str
    model: str


class Questions:
    """Requests with different questions."""

    def __init__(self, new_tokens: int) -> None:
        self._new_tokens = new_tokens
        self._numbers = itertools.count()

    def next_body(self, model: str) -> dict[str, Any]:
        """Return the body of the next request, with a question that no earlier request had."""
        question = f"Where do I find book number {next(self._numbers)}?"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
        options = {"max_tokens": self._new_tokens, "temperature": 0, "ignore_eos": True}
        return {"model": model, "messages": messages, **options}


async def call_for(seconds: float, server: Server, questions: Questions, callers: int) -> tuple[list[float], float]:
    """Keep `callers` calls in flight for this many seconds.

    Returns:
        The latency of each call, and the seconds until the last call was answered.

    Raises:
        RuntimeError: a call failed, or its answer is empty.
    """
    latencies_s: list[float] = []
    start_s = time.perf_counter()
    connector = aiohttp.TCPConnector(limit=callers)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:

        async def call() -> None:
            while (sent_s := time.perf_counter()) < start_s + seconds:
                async with session.post(server.url, json=questions.next_body(server.model)) as response:
                    answer = await response.json()
                if response.status != 200 or not answer["choices"][0]["message"]["content"]:
                    raise RuntimeError(f"{server.name}: expected an answer, got {response.status}: {answer}")
                latencies_s.append(time.perf_counter() - sent_s)

        await asyncio.gather(*(call() for _ in range(callers)))
    return latencies_s, time.perf_counter() - start_s


def commands(options: argparse.Namespace) -> dict[str, tuple[list[str], int, Mapping[str, str]]]:
    """Return the command, the port and the environment variables of each server. Raises NotInstalled."""
    radixkv_port, vllm_port = free_port(), free_port()
    python = Environments(options.cache, RECIPES).python("vllm")
    scripts = python.parent
    radixkv = serve_command(str(options.model), None, [f"model.dtype={options.dtype}"])
    radixkv += ["--http-port", str(radixkv_port)]
    vllm = [str(scripts / "vllm"), "serve", str(options.model), "--host", "127.0.0.1"]
    vllm += ["--served-model-name", _VLLM_MODEL_NAME]
    vllm += ["--port", str(vllm_port), "--dtype", options.dtype, "--max-num-seqs", "64", "--disable-uvicorn-access-log"]
    variables = {**vllm_variables(scripts, options.cache.absolute()), "PYTHONPATH": ""}
    return {"radixkv": (radixkv, radixkv_port, {}), "vllm": (vllm, vllm_port, variables)}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the rows, one for each number of new tokens."""
    rows = []
    with ExitStack() as stack:
        servers = []
        for name, (command, port, variables) in commands(options).items():
            stack.enter_context(closing(HttpEngine(command, port, variables)))
            model = _VLLM_MODEL_NAME if name == "vllm" else ""  # an empty name means the model that radixkv serves
            servers.append(Server(name, f"http://127.0.0.1:{port}/v1/chat/completions", model))
        for new_tokens in options.new_tokens:
            latencies_s: dict[str, list[float]] = {each.name: [] for each in servers}
            calls_per_s: dict[str, list[float]] = {each.name: [] for each in servers}
            questions = Questions(new_tokens)
            for number in range(options.rounds + 1):  # the first round warms up
                for server in servers:
                    round_s = options.seconds if number else min(options.seconds, _WARM_UP_S)
                    new_latencies_s, took_s = asyncio.run(call_for(round_s, server, questions, options.callers))
                    if number:
                        latencies_s[server.name] += new_latencies_s
                        calls_per_s[server.name].append(len(new_latencies_s) / took_s)
            row: dict[str, Any] = {"new_tokens": new_tokens, "callers": options.callers}
            for server in servers:
                row[server.name] = {
                    "calls_per_s": statistics.median(calls_per_s[server.name]),
                    "latency_ms": distribution([1000 * each for each in latencies_s[server.name]]),
                }
            row["ratio"] = row["radixkv"]["calls_per_s"] / row["vllm"]["calls_per_s"]
            rows.append(row)
            print(f"{new_tokens} new tokens: {row}")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the rows, write JSON. Returns 2 if vLLM cannot be installed or a server failed, else 0."""
    parser = argparse.ArgumentParser(description="Compare the HTTP APIs of radixkv and vLLM.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--callers", type=positive, default=16)
    parser.add_argument("--new-tokens", type=positive, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=positive_number, default=8.0, help="seconds of each round; default 8")
    parser.add_argument("--cache", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        rows = measure(options)
    except (NotInstalled, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {"rows": rows, "peer": RECIPES["vllm"].requirements}
    write_result(options.json, "bench.http_calls", arguments, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
