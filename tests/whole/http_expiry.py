"""Random calls of Anthropic's API while hours pass: a retained document is read until its time to live has expired.

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
_MAX_SECONDS_BETWEEN_CALLS = 240.0
_WORDS = ("shade", "sun", "rain", "soil", "seed", "root", "leaf", "bee")


@dataclass
class Document:
    """A document at the beginning of several prompts, with a breakpoint after it.

    Attributes:
        text: the text of the document.
        ttl: the time to live at its breakpoint, `5m` or `1h`.
        num_tokens: the tokens of a prompt up to the breakpoint; 0 before the first call.
        expires_at_s: when its time to live expires, on the clock of the cache.
    """

    text: str
    ttl: str
    num_tokens: int = 0
    expires_at_s: float = 0.0

    def request(self, question: str) -> dict[str, Any]:
        """Return the body of a call with a question about the document."""
        control = {"type": "ephemeral", "ttl": self.ttl}
        system = [{"type": "text", "text": self.text, "cache_control": control}]
        return {"max_tokens": 1, "system": system, "messages": [{"role": "user", "content": question}]}

    def check_usage(self, usage: dict[str, Any], num_prompt_tokens: int, now_s: float) -> str:
        """Return the outcome of a call; the first one sets `num_tokens`.

        Args:
            usage: reported by the response.
            num_prompt_tokens: the tokens of the prompt of the call.
            now_s: when the call was made, on the clock of the cache.

        Returns:
            `first`; `retained` if the document was read before it expired; `kept` if it was read after that;
            `evicted` if it was not read because it had expired; otherwise another miss reason, or `WRONG` and a
            description of the mistake.
        """
        read, created = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        if usage["input_tokens"] + created + read != num_prompt_tokens:
            return f"WRONG the counts do not add up to {num_prompt_tokens}: {usage}"
        if not self.num_tokens:
            self.num_tokens = read + created
            return "first"
        if read + created < self.num_tokens:
            return f"WRONG the breakpoint is after {read + created} tokens, and was after {self.num_tokens}"
        is_document_read = read >= self.num_tokens
        if now_s < self.expires_at_s:
            if is_document_read:
                return "retained"
            return f"WRONG read {read} of {self.num_tokens} tokens before they expired"
        if is_document_read:
            return "kept"
        miss_reason = str(usage["miss_reason"])
        return "evicted" if miss_reason == "expired" else miss_reason


async def run(num_calls: int, seed: int) -> Counter[str]:
    """Make calls, and count their outcomes."""
    rng, clock, outcomes = random.Random(seed), FakeClock(), Counter[str]()
    tokenizer: Tokenizer = byte_level()
    cache = PrefixCache(_NUM_BLOCKS, _BLOCK_SIZE, max_retained_blocks=_NUM_BLOCKS, clock=clock)
    engine = Engine(cast("Runner", NullRunner(_VOCAB_SIZE)), cache, EngineConfig())
    documents = [Document(_words(rng, 30), rng.choice(sorted(_TTL_S))) for _ in range(_NUM_DOCUMENTS)]
    server = Server(engine, ServerConfig(port=0, http_port=0), "tiny")
    engine.start()
    try:
        await server.start()
        assert server.http_address is not None, "an HTTP port is configured"
        port = int(server.http_address.rpartition(":")[2])
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
            for _ in range(num_calls):
                clock.now_s += rng.random() * _MAX_SECONDS_BETWEEN_CALLS
                document = rng.choice(documents)
                body = document.request(_words(rng, 12))
                usage = await asyncio.to_thread(_send, connection, body)
                messages = [{"role": "system", "content": document.text}, *body["messages"]]
                num_prompt_tokens = len(tokenizer.encode_chat(messages))
                outcomes[document.check_usage(usage, num_prompt_tokens, clock.now_s)] += 1
                document.expires_at_s = max(document.expires_at_s, clock.now_s + _TTL_S[document.ttl])
        await server.drain()
    finally:
        engine.stop()
    return outcomes


def _send(connection: http.client.HTTPConnection, body: dict[str, Any]) -> dict[str, Any]:
    """Make a call, and return the usage in its response."""
    connection.request("POST", "/v1/messages", json.dumps(body))
    answer = json.load(connection.getresponse())
    assert "usage" in answer, answer
    usage: dict[str, Any] = answer["usage"]
    return usage


def _words(rng: random.Random, number: int) -> str:
    return " ".join(rng.choices(_WORDS, k=number))


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
