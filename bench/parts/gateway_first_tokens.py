"""Measures the time to first token through a gateway and directly, alternately."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple
from urllib.parse import urlsplit

from radixkv.errors import ConfigError
from radixkv.service.client import Client

_PREFIX_TOKENS, _SUFFIX_TOKENS = 512, 64
_NUM_BYTE_TOKENS = 256  # random ids are below this
_WARM_UP_CALLS = 3
_SAMPLING = {"max_new_tokens": 2, "temperature": 0}
_TIMEOUT_S = 60.0


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
