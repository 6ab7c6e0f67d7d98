"""Measures what authentication by a bearer token or a client certificate adds to a call.

python -m bench.hostile.credentials [--rounds 12] [--calls 200] [--json FILE]

Four servers of the same program, with a model that costs nothing, are called in turn, one call at a time:

    open          loopback, no TLS, no credentials
    tls           TLS alone; the difference from `open` is the cost of encryption
    token         TLS and a bearer token; the difference from `tls` is the cost of checking the token
    certificate   mutual TLS; the difference from `tls` is the cost of checking the client's certificate

Times of rounds are compared with those of `tls` in the same round. The exit status is 1 if authentication adds 100 us
or more.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import trustme

from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, null_service_command
from bench.rpc import Requests

MAX_ADDED_US = 100.0
ARMS = ("open", "tls", "token", "certificate")

_METHOD = "/radixkv.v1.PrefillService/Prefill"
_TIMEOUT_S = 60.0
_NUM_TOKENS = 128
_CALLER = "caller.example"
_REFUSALS = {"token": grpc.StatusCode.UNAUTHENTICATED, "certificate": grpc.StatusCode.UNAVAILABLE}


@dataclass(frozen=True, slots=True)
class ArmCredentials:
    """Files and secrets of the servers and the caller, in a folder.

    Attributes:
        settings: settings of the server, by arm.
        credentials: credentials of the caller's connection, by arm; None without TLS.
        metadata: metadata of the caller's calls, by arm.
    """

    settings: dict[str, list[str]]
    credentials: dict[str, grpc.ChannelCredentials | None]
    metadata: dict[str, tuple[tuple[str, str], ...]]

    @classmethod
    def create(cls, folder: Path) -> ArmCredentials:
        """Create a CA, the certificates of server and caller, and a token, and write the files that servers read."""
        ca, token = trustme.CA(), secrets.token_urlsafe(32)
        server, caller = ca.issue_cert("127.0.0.1"), ca.issue_cert(_CALLER)
        ca.cert_pem.write_to_path(folder / "ca.pem")
        server.private_key_pem.write_to_path(folder / "server.key")
        server.cert_chain_pems[0].write_to_path(folder / "server.pem")
        template = '[[credentials]]\nname = "{0}"\ntenant = "{0}"\n{1} = "{2}"\n'
        digest = hashlib.sha256(token.encode()).hexdigest()
        (folder / "tokens.toml").write_text(
            template.format("a", "token_sha256", digest) + template.format("b", "certificate", _CALLER),
            encoding="utf-8",
        )
        tls = [f"server.{key}={json.dumps(str(folder / name))}" for key, name in _TLS_FILES.items()]
        tokens = f"server.tokens_file={json.dumps(str(folder / 'tokens.toml'))}"
        client_ca = f"server.client_ca={json.dumps(str(folder / 'ca.pem'))}"
        root = ca.cert_pem.bytes()
        one_sided = grpc.ssl_channel_credentials(root)
        mutual = grpc.ssl_channel_credentials(root, caller.private_key_pem.bytes(), caller.cert_chain_pems[0].bytes())
        return cls(
            {"open": [], "tls": tls, "token": [*tls, tokens], "certificate": [*tls, tokens, client_ca]},
            {"open": None, "tls": one_sided, "token": one_sided, "certificate": mutual},
            {**dict.fromkeys(ARMS, ()), "token": (("authorization", f"Bearer {token}"),)},
        )


_TLS_FILES = {"tls_certificate": "server.pem", "tls_key": "server.key"}


@dataclass(frozen=True, slots=True)
class CredentialRound:
    """The calls of one round to one server.

    Attributes:
        call_us: median time of a call.
        server_cpu_us: CPU time of the server per call; None if the system does not report it.
    """

    call_us: float
    server_cpu_us: float | None


class Arm:
    """One server and its caller."""

    def __init__(self, process: ServerProcess, channel: grpc.aio.Channel, metadata: Any) -> None:
        self._process = process
        self._call = channel.unary_unary(_METHOD, None, None)
        self._metadata = metadata
        self._request = Requests(_NUM_TOKENS, seed=0).hit()

    async def measure_round(self, num_calls: int) -> CredentialRound:
        """Make calls, one after the other."""
        call_times_s, cpu_before_s = [], self._process.cpu_s
        for _ in range(num_calls):
            start_s = time.perf_counter()
            await self._call(self._request, metadata=self._metadata, timeout=_TIMEOUT_S)
            call_times_s.append(time.perf_counter() - start_s)
        cpu_after_s = self._process.cpu_s
        used_us = (
            None if cpu_before_s is None or cpu_after_s is None else (cpu_after_s - cpu_before_s) / num_calls * 1e6
        )
        return CredentialRound(statistics.median(call_times_s) * 1e6, used_us)


async def measure(num_rounds: int, num_calls: int) -> list[dict[str, Any]]:
    """Start the servers and call them in turn, each round in another order. Returns a row for each arm."""
    rounds: dict[str, list[CredentialRound]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as processes:
        arm_credentials = ArmCredentials.create(Path(folder))
        async with AsyncExitStack() as channels:
            arms = {name: await _start_arm(name, arm_credentials, processes, channels) for name in ARMS}
            for number in range(-1, num_rounds):  # round -1 warms up
                first = number % len(ARMS)
                for name in (*ARMS[first:], *ARMS[:first]):
                    measured = await arms[name].measure_round(num_calls)
                    if number >= 0:
                        rounds[name].append(measured)
    return list(_rows(rounds, num_calls))


async def _start_arm(name: str, arm_credentials: ArmCredentials, processes: ExitStack, channels: AsyncExitStack) -> Arm:
    process = ServerProcess(null_service_command(arm_credentials.settings[name]))
    address = processes.enter_context(process)
    credentials, options = arm_credentials.credentials[name], [("grpc.enable_http_proxy", 0)]
    channel = (
        grpc.aio.insecure_channel(address, options=options)
        if credentials is None
        else grpc.aio.secure_channel(address, credentials, options=options)
    )
    if name in _REFUSALS:
        await _check_refusal(name, address, arm_credentials)
    return Arm(process, await channels.enter_async_context(channel), arm_credentials.metadata[name])


async def _check_refusal(name: str, address: str, arm_credentials: ArmCredentials) -> None:
    """Check that a server refuses callers without credentials, and for no other reason."""
    without_credentials = arm_credentials.credentials["tls"]
    assert without_credentials is not None, "the arm `tls` has credentials"
    async with grpc.aio.secure_channel(address, without_credentials) as channel:
        call = channel.unary_unary(_METHOD, None, None)(b"", timeout=_TIMEOUT_S)
        code = await call.code()
    assert code is _REFUSALS[name], f"{name}: expected to refuse a caller without credentials, got {code.name}"


def _rows(rounds: dict[str, list[CredentialRound]], num_calls: int) -> Iterator[dict[str, Any]]:
    for name, measured in rounds.items():
        added_us = [each.call_us - tls.call_us for each, tls in zip(measured, rounds["tls"], strict=True)]
        cpu_us = [each.server_cpu_us for each in measured if each.server_cpu_us is not None]
        yield {
            "arm": name,
            "calls": len(measured) * num_calls,
            "call_us": statistics.median(each.call_us for each in measured),
            "added_to_tls_us": statistics.median(added_us),
            "added_to_tls_us_by_round": added_us,
            "server_cpu_us": statistics.fmean(cpu_us) if cpu_us else None,  # a mean: clock ticks are longer than calls
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Measure what a token or a certificate adds to a call.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--calls", type=int, default=200, help="calls of each round to each server; default 200")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = asyncio.run(measure(options.rounds, options.calls))
    print(f"{'arm':<12} {'calls':>6} {'call us':>8} {'added to tls':>13} {'server cpu us':>14}")
    for row in rows:
        print(
            f"{row['arm']:<12} {row['calls']:>6} {row['call_us']:8.0f} {row['added_to_tls_us']:13.1f} "
            f"{row['server_cpu_us'] or 0:14.0f}"
        )
    result = {"rows": rows, "rounds": options.rounds, "calls": options.calls}
    write_result(options.json, "bench.hostile.credentials", arguments, result)
    added = [row["added_to_tls_us"] for row in rows if row["arm"] in ("token", "certificate")]
    return int(max(added) >= MAX_ADDED_US)


if __name__ == "__main__":
    sys.exit(main())
