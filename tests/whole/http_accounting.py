"""Random calls of Anthropic's API: the counts in `usage` add up, and never exceed what an oracle allows.

    python -m tests.whole.http_accounting --calls 10000

Conversations grow, branch and return in two namespaces, with breakpoints at random places. The oracle remembers the
tokens of every prompt of a namespace: what is cached of a prompt is at most, and without evictions exactly, its longest
common prefix with one of them.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
from collections import Counter
from typing import Any

from radixkv.service.client import Client, Tokenizer
from tests.free_port import free_port
from tests.patience import PATIENCE_S
from tests.whole.forked_server import serving

_WORDS = ("shade", "sun", "rain", "soil", "seed", "root", "leaf", "bee")
_TTLS = ("5m", "1h")
_MAX_BREAKPOINTS = 4
_TOKENS_PER_CALL = 256  # of the pool, so that nothing is evicted: a branch begins a new block
_MIN_FREE_BLOCKS = 8
_MAX_SHOWN = 10


class PrefixOracle:
    """The prompts of one namespace, as a tree of their tokens."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def num_known(self, token_ids: list[int]) -> int:
        """Return the length of the longest known prefix."""
        node = self._root
        for index, token_id in enumerate(token_ids):
            if token_id not in node:
                return index
            node = node[token_id]
        return len(token_ids)

    def add(self, token_ids: list[int]) -> None:
        """Add a prompt."""
        node = self._root
        for token_id in token_ids:
            node = node.setdefault(token_id, {})


class Conversations:
    """Random conversations: new ones, and further or other turns of earlier ones."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._earlier: list[list[dict[str, Any]]] = []

    def next(self) -> dict[str, Any]:
        """Return the system prompt and the messages of a request, with breakpoints."""
        choose = self._random
        messages = (
            [_copy(each) for each in choose.choice(self._earlier)] if self._earlier and choose.random() < 0.7 else []
        )
        if messages and choose.random() < 0.3:
            del messages[choose.randrange(len(messages)) :]
        if len(messages) % 2:
            messages.append(self._message("assistant"))
        messages.append(self._message("user"))
        if len(messages) < 8:
            self._earlier = [*self._earlier[-200:], [_copy(each) for each in messages]]
        system = [{"type": "text", "text": f"Answer in the style of number {choose.randrange(3)}."}]
        blocks = [*system, *(block for message in messages for block in message["content"])]
        num_breakpoints = min(choose.randrange(_MAX_BREAKPOINTS + 1), len(blocks))
        places = sorted(choose.sample(range(len(blocks)), num_breakpoints))
        for place, ttl in zip(places, sorted(choose.choices(_TTLS, k=num_breakpoints)), strict=True):
            blocks[place]["cache_control"] = {"type": "ephemeral", "ttl": ttl}
        return {"system": system, "messages": messages}

    def _message(self, role: str) -> dict[str, Any]:
        choose = self._random
        words = [choose.choices(_WORDS, k=choose.randrange(1, 9)) for _ in range(choose.randrange(1, 3))]
        return {"role": role, "content": [{"type": "text", "text": " ".join(each)} for each in words]}


def _copy(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [{"type": "text", "text": block["text"]} for block in message["content"]]
    return {"role": message["role"], "content": blocks}


def check(usage: dict[str, Any], token_ids: list[int], num_known: int, has_breakpoint: bool) -> str:
    """Return what is wrong with a usage; empty if nothing is."""
    plain, created, read = (
        usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    )
    if plain + created + read != len(token_ids):
        return f"{plain} + {created} + {read} tokens, and the prompt has {len(token_ids)}"
    if sum(usage["cache_creation"].values()) != created or (created and not has_breakpoint):
        return f"{created} created, of which {usage['cache_creation']}"
    if read != min(num_known, len(token_ids) - 1):  # at least one token is computed
        return f"{read} read, and {num_known} were known"
    return ""


def run(num_calls: int, seed: int) -> Counter[str]:
    """Make calls, and count what was right and what was wrong."""
    port, outcomes = free_port(), Counter[str]()
    with (
        serving(
            "--http-port",
            str(port),
            "--set",
            "cache.max_retained_share=1",
            "--set",
            f"cache.capacity_tokens={_TOKENS_PER_CALL * num_calls}",
        ) as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection,
    ):
        tokenizer: Tokenizer = client.tokenizer()
        conversations = Conversations(seed)
        oracles = {salt: PrefixOracle() for salt in ("a", "b")}
        choose = random.Random(seed + 1)
        for _ in range(num_calls):
            request = conversations.next()
            salt = choose.choice(sorted(oracles))
            max_tokens = choose.choice((0, 1, 1))
            body = {"model": "tiny", "max_tokens": max_tokens, "cache_salt": salt, **request}
            connection.request("POST", "/v1/messages", json.dumps(body))
            response = json.load(connection.getresponse())
            if "usage" not in response:
                outcomes[f"WRONG {response}"] += 1
                continue
            token_ids = tokenizer.encode_chat([{"role": "system", "content": request["system"]}, *request["messages"]])
            wrong = check(
                response["usage"],
                token_ids,
                oracles[salt].num_known(token_ids),
                has_breakpoint="cache_control" in json.dumps(request),
            )
            oracles[salt].add(token_ids)
            outcomes[f"WRONG {wrong}" if wrong else "right"] += 1
        num_free = client.stats().blocks.free
    print(json.dumps(dict(outcomes.most_common(_MAX_SHOWN)), indent=2))
    if num_free < _MIN_FREE_BLOCKS:
        outcomes["WRONG the pool was full, so blocks may have been evicted"] += 1
    return outcomes


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if set(run(arguments.calls, arguments.seed)) != {"right"}:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
