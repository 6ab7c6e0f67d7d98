"""Shows a fleet on Ray: routing by prefixes, decoding on another server, and a replica that is killed.

python -m bench.fleet.demo

Starts two replicas of the embedded model and their ingress on loopback, and stops them at the end. The exit status is 0
if every prompt was answered, decoding on the other replica gave the same tokens, and the killed replica was replaced; 1
if not; and 2 if a process did not start.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from bench.fleet.fleet_process import FleetProcess
from bench.parts.talk import PromptTokens, Talk, num_finished, say
from radixkv.errors import ConfigError
from radixkv.service.client import Client, KVSource
from radixkv.v1.fleet_pb2 import RouteReason

_SETTINGS = (
    "cache.capacity_tokens=65536",
    "server.drain_timeout_s=2",
    "fleet.least_match_tokens=256",
    "fleet.health_timeout_s=2",
)
_TENANT = "acme"
_NUM_CONVERSATIONS = 8
_NUM_TURNS = 5
_NUM_AT_ONCE = 4
_SYSTEM_TOKENS = 768
_TURN_TOKENS = 64
_NEW_TOKENS = 8
_VOCABULARY = 500
_TIMEOUT_S = 60.0
_MAX_RESTART_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        The exit status.
    """
    argparse.ArgumentParser(description="Show a fleet on Ray.").parse_args(arguments)
    say("start", "starting Ray, two engines and an ingress, which takes half a minute")
    try:
        with FleetProcess(2, _SETTINGS) as fleet, Client(fleet.address, timeout_s=_TIMEOUT_S) as client:
            return _show(fleet, client)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _show(fleet: FleetProcess, client: Client) -> int:
    """Run all steps on a fleet that has started. Returns 0 if all succeeded, else 1."""
    replicas = fleet.replicas()
    say("fleet", f"{fleet.address}, in front of {' and '.join(replicas)}")
    prompt = _prompt(-1, 0)
    cold, warm = (client.prefill(prompt, tenant=_TENANT) for _ in range(2))
    say("prefill", f"{_prompt_tokens(cold)}, then {_prompt_tokens(warm)}")
    route = client.route(prompt, tenant=_TENANT)
    say("route", f"{route.address}, {RouteReason.Name(route.reason)}, {route.cached_tokens} tokens cached")

    before_kill = _converse(client, range(_NUM_TURNS))
    say("talk", f"{_NUM_CONVERSATIONS} conversations of {_NUM_TURNS} turns, {before_kill}")
    finished_counts = [num_finished(address) for address in replicas]
    say("shared by", ", ".join(f"{name}: {count}" for name, count in zip(replicas, finished_counts, strict=True)))
    has_same_tokens = _decode_elsewhere(client, route.address)

    victim = replicas[finished_counts.index(max(finished_counts))]
    fleet.kill(victim)
    killed_s = time.monotonic()
    say("kill -9", f"{victim}, which answered most prompts, is gone; sending more")
    after_kill = _converse(client, range(_NUM_TURNS, 2 * _NUM_TURNS))
    say("talk on", f"{_NUM_CONVERSATIONS} conversations of {_NUM_TURNS} more turns, {after_kill}")
    running = fleet.replicas()
    while len(running) < 2 and time.monotonic() - killed_s < _MAX_RESTART_S:
        time.sleep(0.2)
        running = fleet.replicas()
    say("restart", f"{' and '.join(running)}, {time.monotonic() - killed_s:.0f} s after the kill")

    failures = (*before_kill.failures, *after_kill.failures)
    say("end", "every prompt was answered" if not failures else f"{len(failures)} failed, first: {failures[0]}")
    return 0 if has_same_tokens and not failures and len(running) == 2 else 1


def _decode_elsewhere(client: Client, address: str) -> bool:
    """Compute a prompt on one replica, and generate on the other from these K/V.

    Returns:
        Whether the tokens are those that the first replica generates from its own K/V.
    """
    prompt = _prompt(-2, 0)
    with Client(address, timeout_s=_TIMEOUT_S) as replica:
        prefilled = replica.prefill(prompt, tenant=_TENANT, hold_lease=True)
        source = KVSource(address=address, lease_id=prefilled.lease_id, epoch=prefilled.epoch)
        chunks_elsewhere = list(client.generate(prompt, tenant=_TENANT, kv_source=source, max_new_tokens=_NEW_TOKENS))
        chunks_here = list(replica.generate(prompt, tenant=_TENANT, max_new_tokens=_NEW_TOKENS))
        replica.release(prefilled.lease_id, tenant=_TENANT)
    has_same_tokens = _tokens(chunks_elsewhere) == _tokens(chunks_here)
    answer = "the same answer" if has_same_tokens else "another answer"
    say("elsewhere", f"K/V of {address} fetched, {_prompt_tokens(chunks_elsewhere[0])}: {answer}")
    return has_same_tokens


def _converse(client: Client, turns: range) -> Talk:
    """Send these turns of every conversation, a few conversations at a time."""

    def talk(conversation: int) -> list[PromptTokens | str]:
        outcomes: list[PromptTokens | str] = []
        for turn in turns:
            try:
                generated = client.generate(_prompt(conversation, turn), tenant=_TENANT, max_new_tokens=_NEW_TOKENS)
                outcomes.append(_prompt_tokens(list(generated)[-1]))
            except grpc.RpcError as error:
                outcomes.append(str(error))
        return outcomes

    with ThreadPoolExecutor(_NUM_AT_ONCE) as threads:
        outcomes_of_conversations = threads.map(talk, range(_NUM_CONVERSATIONS))
        return Talk([outcome for outcomes in outcomes_of_conversations for outcome in outcomes])


def _prompt(conversation: int, turn: int) -> list[int]:
    """Return the tokens of a conversation through a turn: its own system prompt, then turns of equal length."""
    draw = random.Random(f"conversation {conversation}")  # as numbers, -1 and 1 would be the same seed
    return draw.choices(range(_VOCABULARY), k=_SYSTEM_TOKENS + (turn + 1) * _TURN_TOKENS)


def _tokens(chunks: Sequence[Any]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def _prompt_tokens(answer: Any) -> PromptTokens:
    return PromptTokens(answer.usage.prompt_tokens, answer.usage.cached_tokens)


if __name__ == "__main__":
    sys.exit(main())
