"""Random calls of Anthropic's API: the counts in `usage` add up, and never exceed what an oracle allows.

    python -m tests.whole.http_accounting --calls 10000

Conversations grow, branch and return in two namespaces, with breakpoints at random places. The oracle remembers the
tokens of every prompt of a namespace: the cached part of a prompt is at most, and without evictions exactly, the
longest prefix that the prompt has in common with an earlier one.
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
_POOL_TOKENS_PER_CALL = 256  # more than a call adds on average, with whole blocks at branches: nothing is evicted
_MIN_FREE_BLOCKS = 8
_MAX_SHOWN_OUTCOMES = 10


class PrefixOracle:
    """The prompts of one namespace, as a tree of their tokens."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}

    def count_known_tokens(self, token_ids: list[int]) -> int:
        """Return the length of the longest prefix of a prompt that is also a prefix of an added one."""
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
    """Random conversations: new ones, continued ones, and ones that branch from an earlier one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._earlier_messages: list[list[dict[str, Any]]] = []

    def next(self) -> dict[str, Any]:
        """Return the system prompt and the messages of a request, with breakpoints."""
        rng = self._random
        messages = []
        if self._earlier_messages and rng.random() < 0.7:
            messages = [_copy(each) for each in rng.choice(self._earlier_messages)]
        if messages and rng.random() < 0.3:
            del messages[rng.randrange(len(messages)) :]  # the conversation branches here
        if len(messages) % 2:
            messages.append(self._message("assistant"))
        messages.append(self._message("user"))
        if len(messages) < 8:
            self._earlier_messages = [*self._earlier_messages[-200:], [_copy(each) for each in messages]]

        system = [{"type": "text", "text": f"Answer in the style of number {rng.randrange(3)}."}]
        blocks = [*system, *(block for message in messages for block in message["content"])]
        num_breakpoints = min(rng.randrange(_MAX_BREAKPOINTS + 1), len(blocks))
        block_indices = sorted(rng.sample(range(len(blocks)), num_breakpoints))
        ttls = sorted(rng.choices(_TTLS, k=num_breakpoints))  # the API demands those of an hour first
        for index, ttl in zip(block_indices, ttls, strict=True):
            blocks[index]["cache_control"] = {"type": "ephemeral", "ttl": ttl}
        return {"system": system, "messages": messages}

    def _message(self, role: str) -> dict[str, Any]:
        rng = self._random
        texts = [" ".join(rng.choices(_WORDS, k=rng.randrange(1, 9))) for _ in range(rng.randrange(1, 3))]
        return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def _copy(message: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a message without its breakpoints."""
    blocks = [{"type": "text", "text": block["text"]} for block in message["content"]]
    return {"role": message["role"], "content": blocks}


def find_mistake(usage: dict[str, Any], token_ids: list[int], num_known: int, has_breakpoint: bool) -> str:
    """Return what is wrong with the usage of a prompt of which `num_known` tokens are cached; empty if nothing is."""
    uncached, created, read = (
        usage[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    )
    if uncached + created + read != len(token_ids):
        return f"{uncached} + {created} + {read} tokens, and the prompt has {len(token_ids)}"
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
            f"cache.capacity_tokens={_POOL_TOKENS_PER_CALL * num_calls}",
        ) as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection,
    ):
        tokenizer: Tokenizer = client.tokenizer()
        conversations = Conversations(seed)
        oracles = {salt: PrefixOracle() for salt in ("a", "b")}
        rng = random.Random(seed + 1)
        for _ in range(num_calls):
            request = conversations.next()
            salt = rng.choice(sorted(oracles))
            max_tokens = rng.choice((0, 1, 1))
            body = {"model": "tiny", "max_tokens": max_tokens, "cache_salt": salt, **request}
            connection.request("POST", "/v1/messages", json.dumps(body))
            response = json.load(connection.getresponse())
            if "usage" not in response:
                outcomes[f"WRONG {response}"] += 1
                continue
            system_message = {"role": "system", "content": request["system"]}
            token_ids = tokenizer.encode_chat([system_message, *request["messages"]])
            mistake = find_mistake(
                response["usage"],
                token_ids,
                oracles[salt].count_known_tokens(token_ids),
                has_breakpoint="cache_control" in json.dumps(request),
            )
            oracles[salt].add(token_ids)
            outcomes[f"WRONG {mistake}" if mistake else "right"] += 1
        num_free = client.stats().blocks.free
    print(json.dumps(dict(outcomes.most_common(_MAX_SHOWN_OUTCOMES)), indent=2))
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
