"""Random calls of Anthropic's API while hours pass: what was retained is read until its time to live has expired.

    python -m tests.whole.http_expiry --calls 10000

The cache is small, and the test moves its clock between calls. Calls are about a few documents with a breakpoint after
them, and each call restarts the time to live of its document. Questions fill the rest of the cache, so that documents
are evicted soon after they have expired. The model takes no time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from bench.parts.null_service import NullRunner
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig, ServerConfig
from radixkv.engine.engine import Engine
from radixkv.service.server.server import Server
from radixkv.service.text.tokenizer import Tokenizer
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S
from tests.service.text.tokenizers import byte_level

_VOCAB_SIZE = 512
_BLOCK_SIZE, _NUM_BLOCKS = 16, 256
_NUM_DOCUMENTS = 12
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_MAX_PAUSE_S = 240.0
_WORDS = ("shade", "sun", "rain", "soil", "seed", "root", "leaf", "bee")


@dataclass
class Document:
    """A document that calls ask about.

    Attributes:
        text: of the document.
        ttl: of its breakpoint.
        num_tokens: of the prompt up to the breakpoint; 0 before the first call.
        expires_s: when its time to live expires, on the clock of the cache.
    """

    text: str
    ttl: str
    num_tokens: int = 0
    expires_s: float = 0.0

    def request(self, question: str) -> dict[str, Any]:
        """Return the body of a call."""
        control = {"type": "ephemeral", "ttl": self.ttl}
        system = [{"type": "text", "text": self.text, "cache_control": control}]
        return {"max_tokens": 1, "system": system, "messages": [{"role": "user", "content": question}]}

    def outcome(self, usage: dict[str, Any], num_prompt: int, now_s: float) -> str:
        """Return what a call shows: `retained`, `kept`, `evicted`, `first`, or `WRONG` and what is wrong.

        Args:
            usage: of the call.
            num_prompt: tokens of its prompt.
            now_s: when it was made.
        """
        read, created = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        if usage["input_tokens"] + created + read != num_prompt:
            return f"WRONG the counts do not add up to {num_prompt}: {usage}"
        if not self.num_tokens:
            self.num_tokens = read + created
            return "first"
        if read + created < self.num_tokens:
            return f"WRONG the breakpoint is after {read + created} tokens, and was after {self.num_tokens}"
        is_whole = read >= self.num_tokens
        if now_s < self.expires_s:
            return "retained" if is_whole else f"WRONG read {read} of {self.num_tokens} tokens before they expired"
        return "kept" if is_whole else "evicted" if usage["miss_reason"] == "expired" else usage["miss_reason"]


async def run(num_calls: int, seed: int) -> Counter[str]:
    """Make calls, and count what they show."""
    choose, clock, outcomes = random.Random(seed), FakeClock(), Counter[str]()
    tokenizer: Tokenizer = byte_level()
    cache = PrefixCache(_NUM_BLOCKS, _BLOCK_SIZE, max_retained_blocks=_NUM_BLOCKS, clock=clock)
    engine = Engine(cast("Runner", NullRunner(_VOCAB_SIZE)), cache, EngineConfig())
    documents = [Document(_words(choose, 30), choose.choice(sorted(_TTL_S))) for _ in range(_NUM_DOCUMENTS)]
    server = Server(engine, ServerConfig(port=0, http_port=0), "tiny")
    engine.start()
    try:
        await server.start()
        assert server.http_address is not None, "the port is configured"
        port = int(server.http_address.rpartition(":")[2])
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
            for _ in range(num_calls):
                clock.now_s += choose.random() * _MAX_PAUSE_S
                document = choose.choice(documents)
                body = document.request(_words(choose, 12))
                usage = await asyncio.to_thread(_usage_of, connection, body)
                messages = [{"role": "system", "content": document.text}, *body["messages"]]
                num_prompt = len(tokenizer.encode_chat(messages))
                outcomes[document.outcome(usage, num_prompt, clock.now_s)] += 1
                document.expires_s = max(document.expires_s, clock.now_s + _TTL_S[document.ttl])
        await server.drain()
    finally:
        engine.stop()
    return outcomes


def _usage_of(connection: http.client.HTTPConnection, body: dict[str, Any]) -> dict[str, Any]:
    connection.request("POST", "/v1/messages", json.dumps(body))
    answer = json.load(connection.getresponse())
    assert "usage" in answer, answer
    usage: dict[str, Any] = answer["usage"]
    return usage


def _words(choose: random.Random, number: int) -> str:
    return " ".join(choose.choices(_WORDS, k=number))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    outcomes = asyncio.run(run(arguments.calls, arguments.seed))
    print(json.dumps(dict(outcomes.most_common()), indent=2))
    if any(each.startswith("WRONG") for each in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
