"""Mutates valid messages into almost valid ones."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from radixkv.gateway import engine_common_pb2, vllm_engine_pb2
from radixkv.v1 import cache_pb2, events_pb2, explain_pb2, fleet_pb2, hints_pb2, model_pb2, prefill_pb2

_PROMPT: dict[str, Any] = {"token_ids": [1, 2, 3, 4, 5], "tenant": "a", "salt": "b"}
_PAYLOAD = Struct()
_PAYLOAD.update({"priority": 60, "end": 4})
_HINTS = hints_pb2.KvHintsEnvelope(
    protocol_version="1.0",
    actions=[
        hints_pb2.KvHintAction(action_id="a", action_type="kv.retain", action_version="1.0", payload=_PAYLOAD),
        hints_pb2.KvHintAction(action_id="b", action_type="kv.prefetch", action_version="1.0"),
    ],
)
_SEGMENTS = [explain_pb2.PromptSegment(name="system", end_token=2), explain_pb2.PromptSegment(name="rest", end_token=5)]
_GATEWAY = "/vllm.grpc.engine.VllmEngine/"
_FILES = (cache_pb2, events_pb2, fleet_pb2, model_pb2, prefill_pb2, vllm_engine_pb2)

METHODS: dict[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in _FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""All methods of proto/, by their paths."""

SEEDS: dict[str, Message] = {
    "/radixkv.v1.PrefillService/Prefill": prefill_pb2.PrefillRequest(
        **_PROMPT, top_logprobs=2, request_id="r", session_id="s", kv_hints=_HINTS
    ),
    "/radixkv.v1.PrefillService/Generate": prefill_pb2.GenerateRequest(
        prefill=prefill_pb2.PrefillRequest(**_PROMPT), max_new_tokens=3, temperature=0.5, stop_token_ids=[9]
    ),
    "/radixkv.v1.PrefillService/Probe": prefill_pb2.ProbeRequest(**_PROMPT),
    "/radixkv.v1.PrefillService/Release": prefill_pb2.ReleaseRequest(lease_id="0" * 32, tenant="a"),
    "/radixkv.v1.PrefillService/Renew": prefill_pb2.RenewRequest(lease_id="0" * 32, tenant="a"),
    "/radixkv.v1.PrefillService/FetchKV": prefill_pb2.FetchKVRequest(
        lease_id="0" * 32, tenant="a", first_block=1, stores=["redis"]
    ),
    "/radixkv.v1.CacheService/Stats": cache_pb2.StatsRequest(max_tenants=3, max_sessions=2),
    "/radixkv.v1.CacheService/Retain": cache_pb2.RetainRequest(**_PROMPT, retention=prefill_pb2.Retention(priority=60)),
    "/radixkv.v1.CacheService/Hint": cache_pb2.HintRequest(**_PROMPT, kv_hints=_HINTS),
    "/radixkv.v1.CacheService/EndSession": cache_pb2.EndSessionRequest(tenant="a", session_id="s"),
    "/radixkv.v1.CacheService/Explain": cache_pb2.ExplainRequest(**_PROMPT, segments=_SEGMENTS),
    "/radixkv.v1.CacheService/Purge": cache_pb2.PurgeRequest(tenant="a", salt="b"),
    "/radixkv.v1.CacheService/ListSegments": cache_pb2.ListSegmentsRequest(tenant="a", page_size=5),
    "/radixkv.v1.CacheService/LoadAdapter": cache_pb2.LoadAdapterRequest(name="law", path="law"),
    "/radixkv.v1.CacheService/UnloadAdapter": cache_pb2.UnloadAdapterRequest(name="law"),
    "/radixkv.v1.CacheService/ListAdapters": cache_pb2.ListAdaptersRequest(),
    "/radixkv.v1.CacheService/RegisterPublicPrefix": cache_pb2.RegisterPublicPrefixRequest(
        token_ids=range(100), name="p"
    ),
    "/radixkv.v1.CacheService/UnregisterPublicPrefix": cache_pb2.UnregisterPublicPrefixRequest(name="p"),
    "/radixkv.v1.CacheService/ListPublicPrefixes": cache_pb2.ListPublicPrefixesRequest(),
    "/radixkv.v1.CacheService/Statement": cache_pb2.StatementRequest(tenant="a", since="2026-11", by_day=True),
    "/radixkv.v1.CacheService/Diagnose": cache_pb2.DiagnoseRequest(tenant="a", max_causes=3),
    "/radixkv.v1.EventService/Subscribe": events_pb2.SubscribeRequest(),
    "/radixkv.v1.FleetService/Route": fleet_pb2.RouteRequest(**_PROMPT, avoid=["a:1"]),
    "/radixkv.v1.ModelService/GetTokenizer": model_pb2.GetTokenizerRequest(),
    f"{_GATEWAY}Generate": vllm_engine_pb2.GenerateRequest(
        request_id="r",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[1, 2, 3, 4, 5]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=3, temperature=0.5, stop_token_ids=[9], logprobs=2),
        stream=True,
    ),
    f"{_GATEWAY}Abort": vllm_engine_pb2.AbortRequest(request_ids=["r", "other"]),
    f"{_GATEWAY}HealthCheck": vllm_engine_pb2.HealthCheckRequest(),
    f"{_GATEWAY}GetModelInfo": vllm_engine_pb2.GetModelInfoRequest(),
    f"{_GATEWAY}GetServerInfo": vllm_engine_pb2.GetServerInfoRequest(),
    f"{_GATEWAY}GetLoads": vllm_engine_pb2.GetLoadsRequest(include=["core"]),
    f"{_GATEWAY}GetTokenizer": engine_common_pb2.GetTokenizerRequest(),
    f"{_GATEWAY}SubscribeKvEvents": engine_common_pb2.SubscribeKvEventsRequest(load_records_before_first_batch=True),
    f"{_GATEWAY}FlushCache": engine_common_pb2.FlushCacheRequest(timeout_s=1.0),
}
"""A valid message of each method of proto/ except `Drain`, which would end the server."""


class Mutations:
    """Generates mutated messages. The same seed generates the same messages."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._valid_messages = {method: message.SerializeToString() for method, message in SEEDS.items()}

    def next_message(self) -> tuple[str, bytes]:
        """Return the path of a random method, and the bytes of a mutated message for it."""
        method = self._rng.choice(list(self._valid_messages))
        data = bytearray(self._valid_messages[method])
        for _ in range(self._rng.randint(1, 4)):
            self._mutate(data)
        return method, bytes(data)

    def _mutate(self, data: bytearray) -> None:
        rng = self._rng
        position = rng.randint(0, len(data))
        kind = rng.randrange(6)
        if kind == 0 and data:  # flip a bit
            data[position % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:  # truncate
            del data[position:]
        elif kind == 2:  # insert random bytes
            data[position:position] = rng.randbytes(rng.randint(1, 20))
        elif kind == 3:  # repeat a part
            data[position:position] = data[position : position + rng.randint(1, 30)]
        elif kind == 4:  # insert a valid message
            data[position:position] = rng.choice(list(self._valid_messages.values()))
        elif data:  # overwrite a byte with the first or last byte of a varint's range
            data[position % len(data)] = rng.choice((0, 0x7F, 0x80, 0xFF))
