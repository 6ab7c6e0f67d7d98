"""Shows the SMG gateway in front of two servers: OpenAI's API, reuse in a conversation, and a server that is killed.

python -m bench.gateway_demo

Starts two servers with the embedded model and the gateway on free local ports, sends questions with OpenAI's client,
and stops everything at the end. The exit status is 0 if every question was answered, and a repeated one with the same
text; 1 if not; and 2 if a package is missing or a process did not start.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from bench.parts.gateway_process import GatewayProcess
from bench.parts.server_process import ServerProcess, serve_command
from bench.parts.talk import PromptTokens, Talk, num_finished, say
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError
from radixkv.service.client import Client

if TYPE_CHECKING:
    from openai import OpenAI

_SETTINGS = ("gateway.enabled=true", "cache.capacity_tokens=32768", "server.drain_timeout_s=2")
_MODEL = "tiny"
_NUM_CONVERSATIONS = 8
_NUM_TURNS = 6
_CONCURRENCY = 4
_NUM_TIMED_CALLS = 40
_TIMEOUT_S = 60.0
# Prompts that are timed: a cached prefix, and a new suffix.
_PREFIX_TOKENS, _SUFFIX_TOKENS = 512, 64
_NUM_BYTE_TOKENS = 256  # random ids are below this
_WARM_UP_CALLS = 3
_SAMPLING = {"max_new_tokens": 2, "temperature": 0}
# Begins with the number of the conversation, so that the system messages of conversations share no prefix.
_SYSTEM = "{0}{0}{0} is your number. You answer in short sentences, in plain English, and never guess. " * 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        The exit status.
    """
    argparse.ArgumentParser(description="Show the SMG gateway in front of two servers.").parse_args(arguments)
    try:
        from openai import OpenAI
    except ModuleNotFoundError:
        print(f"error: {missing_package('openai', 'gateway')}", file=sys.stderr)
        return 2
    try:
        with ExitStack() as stack:
            servers = [ServerProcess(serve_command(_MODEL, "cpu", _SETTINGS)) for _ in range(2)]
            with ThreadPoolExecutor(len(servers)) as threads:  # the servers load at the same time
                addresses = list(threads.map(stack.enter_context, servers))
            say("servers", f"{' and '.join(addresses)}: radixkv serve --model {_MODEL} --set gateway.enabled=true")
            url = stack.enter_context(GatewayProcess(addresses))
            say("gateway", f"{url}/v1: smg, which routes by cached prefixes")
            with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_S) as client:
                return _show(client, url, servers, addresses)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _show(client: OpenAI, url: str, servers: Sequence[ServerProcess], addresses: Sequence[str]) -> int:
    """Send all questions, kill a server between them, and print what happens. Returns the exit status."""
    question = _messages(0, 0)
    first, again = (_ask(client, question) for _ in range(2))
    say("chat", f"{first.choices[0].message.content!r}, {_prompt_tokens(first)}")
    say("again", f"{again.choices[0].message.content!r}, {_prompt_tokens(again)}")
    chunks = client.chat.completions.create(model=_MODEL, messages=question, max_tokens=8, temperature=0, stream=True)
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    say("stream", " | ".join(map(repr, texts)))
    first_tokens = time_first_tokens(url, addresses[0], _MODEL, _NUM_TIMED_CALLS)
    say("ttft", f"{first_tokens.gateway_ms:.1f} ms, {first_tokens.direct_ms:.1f} ms without the gateway: medians")
    before_kill = _converse(client, range(_NUM_TURNS))
    say("talk", f"{_NUM_CONVERSATIONS} conversations of {_NUM_TURNS} turns, {before_kill}")
    counts = [num_finished(address) for address in addresses]
    say("shared by", ", ".join(f"{address}: {count}" for address, count in zip(addresses, counts, strict=True)))
    victim = counts.index(max(counts))
    os.kill(servers[victim].pid, signal.SIGKILL)
    say("kill -9", f"{addresses[victim]}, which answered most questions, is gone; sending more")
    after_kill = _converse(client, range(_NUM_TURNS, 2 * _NUM_TURNS))
    say("talk on", f"{_NUM_CONVERSATIONS} conversations of {_NUM_TURNS} more turns, {after_kill}")
    failures = (*before_kill.failures, *after_kill.failures)
    is_same = first.choices[0].message.content == again.choices[0].message.content
    if failures:
        outcome = f"{len(failures)} failed, first: {failures[0]}"
    else:
        outcome = "every question was answered" if is_same else "a repeated question got another answer"
    say("end", outcome)
    return 0 if is_same and not failures else 1


class FirstTokens(NamedTuple):
    """Medians of the times to first token.

    Attributes:
        gateway_ms: through the gateway, from the request to the first chunk of a streamed answer.
        direct_ms: directly from one of its servers.
    """

    gateway_ms: float
    direct_ms: float


def time_first_tokens(url: str, address: str, model: str, num_calls: int) -> FirstTokens:
    """Send prompts to a gateway and to one of its servers in turn, each with a new suffix after a cached prefix.

    Args:
        url: URL of the gateway.
        address: address of the server.
        model: name of the model at the gateway.
        num_calls: measured calls to each, after some that warm up.

    Raises:
        ConfigError: the gateway does not stream an answer.
    """
    generator = random.Random(0)
    prefix = _random_ids(generator, _PREFIX_TOKENS)
    gateway_s: list[float] = []
    direct_s: list[float] = []
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    with closing(connection), Client(address, timeout_s=_TIMEOUT_S) as client:
        for _ in range(_WARM_UP_CALLS + num_calls):
            gateway_s.append(_time_gateway(connection, model, [*prefix, *_random_ids(generator, _SUFFIX_TOKENS)]))
            direct_s.append(_time_server(client, [*prefix, *_random_ids(generator, _SUFFIX_TOKENS)]))
    return FirstTokens(_median_ms(gateway_s), _median_ms(direct_s))


def _time_gateway(connection: http.client.HTTPConnection, model: str, ids: Sequence[int]) -> float:
    """Return the seconds from a request to the gateway to the first line of its answer."""
    body = {"model": model, "input_ids": ids, "sampling_params": _SAMPLING, "stream": True}
    start_s = time.perf_counter()
    connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
    with connection.getresponse() as response:
        first_line = response.readline()
        ttft_s = time.perf_counter() - start_s
        other_lines = response.read()  # so that the connection can be used again
    if response.status != http.HTTPStatus.OK or not first_line.startswith(b"data:"):
        raise ConfigError(
            f"gateway: expected a streamed answer, got {response.status} {(first_line + other_lines)[:200]!r}"
        )
    return ttft_s


def _time_server(client: Client, ids: Sequence[int]) -> float:
    """Return the seconds from a request to the server to the first chunk of its answer."""
    start_s = time.perf_counter()
    answers = client.generate(ids, max_new_tokens=_SAMPLING["max_new_tokens"])
    next(answers)
    ttft_s = time.perf_counter() - start_s
    list(answers)  # so that the call ends before the next one begins
    return ttft_s


def _random_ids(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(_NUM_BYTE_TOKENS) for _ in range(count)]


def _median_ms(times_s: Sequence[float]) -> float:
    """Return the median of the measured calls, which follow the warm-up calls."""
    return 1e3 * statistics.median(times_s[_WARM_UP_CALLS:])


def _converse(client: OpenAI, turns: range) -> Talk:
    """Send these turns of every conversation, a few conversations at a time."""

    def ask(turn: int, conversation: int) -> PromptTokens | str:
        from openai import OpenAIError

        try:
            return _prompt_tokens(_ask(client, _messages(conversation, turn)))
        except OpenAIError as error:
            return str(error)

    questions = [(turn, conversation) for turn in turns for conversation in range(_NUM_CONVERSATIONS)]
    with ThreadPoolExecutor(_CONCURRENCY) as threads:
        return Talk(list(threads.map(lambda each: ask(*each), questions)))


def _messages(conversation: int, last_turn: int) -> Any:
    """Return the messages of a conversation up to the question of a turn, with fixed answers to earlier questions."""
    messages = [{"role": "system", "content": _SYSTEM.format(conversation)}]
    for turn in range(last_turn + 1):
        messages.append({"role": "user", "content": f"Question {turn} of conversation {conversation}: and then?"})
        if turn < last_turn:
            messages.append({"role": "assistant", "content": f"Answer {turn}."})
    return messages


def _ask(client: OpenAI, messages: Any) -> Any:
    return client.chat.completions.create(model=_MODEL, messages=messages, max_tokens=8, temperature=0)


def _prompt_tokens(answer: Any) -> PromptTokens:
    usage = answer.usage
    return PromptTokens(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


if __name__ == "__main__":
    sys.exit(main())
