"""Measures the gain of a router that knows which blocks the stores of the servers have.

    python -m bench.fleet.stores [--groups 40] [--prompts 10] [--rounds 3] [--json FILE]

Two servers of the embedded model each have a pool for a few of the prefixes, and host memory for all of them. Groups of
prompts with a common prefix arrive in random order, several at a time, and are routed by the events of the servers. A
router that also receives the events of stores is compared, in turn, with one that receives only those of devices; both
start with empty servers. The exit status is 0 if all prompts were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.fleet.grouped_prompts import Geometry
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.policies import make_routing
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.router import Router
from radixkv.service.cli.argument_types import positive
from radixkv.service.client import AsyncClient
from radixkv.service.fleet.event_subscription import EventSubscription
from radixkv.v1 import events_pb2

_EVENT_BLOCK_TOKENS = 16  # the default of `events.block_size`
_NAMESPACE = Namespace("tiny")
_TIMEOUT_S = 600.0
_KNOWS_STORES = {"stores": True, "devices": False}  # by the name of the router in the result


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare both routers, print and write what was reused."""
    options = _parser().parse_args(arguments)
    settings = [f"cache.capacity_tokens={options.pool_tokens}", f"tiers.host_bytes={options.host_bytes}"]
    command = serve_command("tiny", "cpu", settings)
    with ServerProcess(command) as first_address, ServerProcess(command) as second_address:
        rows = asyncio.run(_measure([first_address, second_address], options))
    min_computed_tokens = options.groups * (options.prefix_tokens + options.prompts * options.question_tokens)
    computed_tokens: Counter[str] = Counter()
    for row in rows:
        computed_tokens[row["router knows"]] += row["computed"]
    ratio = computed_tokens["stores"] / computed_tokens["devices"]
    print(
        f"computed tokens, stores over devices: {ratio:.2f}; at least {min_computed_tokens} per round must be computed"
    )
    result = {"rows": rows, "least_computed_tokens": min_computed_tokens, "ratio": ratio}
    write_result(options.json, "bench.fleet.stores", arguments, result)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet.stores", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--groups", type=positive, default=40, help="number of groups of prompts with the same prefix")
    parser.add_argument("--prompts", type=positive, default=10, help="prompts of each group")
    parser.add_argument("--prefix-tokens", type=positive, default=1216)
    parser.add_argument("--question-tokens", type=positive, default=64)
    parser.add_argument("--pool-tokens", type=positive, default=8192, help="capacity of each server's pool")
    parser.add_argument("--host-bytes", type=positive, default=2 * 10**9, help="host memory of each server")
    parser.add_argument("--concurrency", type=positive, default=4, help="prompts at a time")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


async def _measure(addresses: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure both routers once in each round. Which of them is first alternates."""
    rows = []
    geometry = Geometry(options.groups, options.prompts, options.prefix_tokens, options.question_tokens, new_tokens=1)
    for round_number in range(options.rounds):
        names = list(_KNOWS_STORES)
        if round_number % 2 == 0:
            names.reverse()
        for name in names:
            prompts = geometry.make_prompts(options.seed + round_number)
            tokens = await _ask_all(addresses, prompts, options.concurrency, knows_stores=_KNOWS_STORES[name])
            rows.append({"router knows": name, "round": round_number, **tokens})
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


class _DeviceEvents:
    """A client that receives only the events of devices."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    def subscribe(
        self, start_sequence_number: int = 0, *, stores: bool = False
    ) -> AsyncGenerator[events_pb2.EventBatch]:
        """Subscribe to the events of the device, whether or not those of stores are requested."""
        return self._client.subscribe(start_sequence_number)


async def _ask_all(
    addresses: Sequence[str], prompts: Sequence[list[int]], concurrency: int, *, knows_stores: bool
) -> dict[str, Any]:
    """Purge the servers and send all prompts. Returns the numbers of cached and computed tokens."""
    view = FleetView(_EVENT_BLOCK_TOKENS)
    router = Router(view, FleetLoad(), PrefixDemand(), make_routing("prefix"), identities=Identities())
    tokens: Counter[str] = Counter()
    remaining_prompts = iter(prompts)  # shared by all tasks

    async def ask_in_turn() -> None:
        for prompt in remaining_prompts:
            route = router.route(_NAMESPACE, np.array(prompt, "<u4").tobytes())
            usage = (await clients[route.name].prefill(prompt)).usage
            router.finished(route, usage.computed_tokens)
            tokens.update(device=usage.device_tokens, host=usage.host_tokens, computed=usage.computed_tokens)

    async with contextlib.AsyncExitStack() as stack:
        clients = {
            address: await stack.enter_async_context(AsyncClient(address, timeout_s=_TIMEOUT_S))
            for address in addresses
        }
        for client in clients.values():
            await client.purge(everything=True)
        subscriptions = []
        for address, client in clients.items():
            router.join(address)
            source = client if knows_stores else _DeviceEvents(client)
            subscriptions.append(asyncio.create_task(EventSubscription(address, source, view).run()))
        try:
            while not all(map(view.is_up_to_date, addresses)):
                await asyncio.sleep(0.01)
            await asyncio.gather(*(ask_in_turn() for _ in range(concurrency)))
        finally:
            for subscription in subscriptions:
                subscription.cancel()
            await asyncio.gather(*subscriptions, return_exceptions=True)
    return dict(tokens)


if __name__ == "__main__":
    sys.exit(main())
