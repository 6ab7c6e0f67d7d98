"""Mutates valid messages into almost valid ones."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.message import Message

from radixkv.v1 import cache_pb2, events_pb2, model_pb2, prefill_pb2

_PROMPT: dict[str, Any] = {"token_ids": [1, 2, 3, 4, 5], "tenant": "a", "salt": "b"}

SEEDS: dict[str, Message] = {
    "/radixkv.v1.PrefillService/Prefill": prefill_pb2.PrefillRequest(**_PROMPT, top_logprobs=2, request_id="r"),
    "/radixkv.v1.PrefillService/Generate": prefill_pb2.GenerateRequest(
        prefill=prefill_pb2.PrefillRequest(**_PROMPT), max_new_tokens=3, temperature=0.5, stop_token_ids=[9]
    ),
    "/radixkv.v1.PrefillService/Probe": prefill_pb2.ProbeRequest(**_PROMPT),
    "/radixkv.v1.PrefillService/Release": prefill_pb2.ReleaseRequest(lease_id="0" * 32, tenant="a"),
    "/radixkv.v1.CacheService/Retain": cache_pb2.RetainRequest(**_PROMPT, retention=prefill_pb2.Retention(priority=60)),
    "/radixkv.v1.CacheService/Purge": cache_pb2.PurgeRequest(tenant="a", salt="b"),
    "/radixkv.v1.CacheService/Stats": cache_pb2.StatsRequest(max_tenants=3),
    "/radixkv.v1.CacheService/ListSegments": cache_pb2.ListSegmentsRequest(tenant="a", page_size=5),
    "/radixkv.v1.EventService/Subscribe": events_pb2.SubscribeRequest(),
    "/radixkv.v1.ModelService/GetTokenizer": model_pb2.GetTokenizerRequest(),
}
"""A valid message of each fuzzed method. `Drain` is not among them, because it would end the server."""


class Mutations:
    """Generates mutated messages. The same seed generates the same messages."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._right = {method: message.SerializeToString() for method, message in SEEDS.items()}

    def next_one(self) -> tuple[str, bytes]:
        """Return a method, and the bytes of a message for it."""
        method = self._rng.choice(list(self._right))
        data = bytearray(self._right[method])
        for _ in range(self._rng.randint(1, 4)):
            self._mutate(data)
        return method, bytes(data)

    def _mutate(self, data: bytearray) -> None:
        rng = self._rng
        at = rng.randint(0, len(data))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 20))
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 30)]
        elif kind == 4:
            data[at:at] = rng.choice(list(self._right.values()))
        elif data:
            data[at % len(data)] = rng.choice((0, 0x7F, 0x80, 0xFF))
