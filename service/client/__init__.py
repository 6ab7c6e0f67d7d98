"""Clients of the service. They need gRPC and numpy, and neither torch nor the engine.

`Client` blocks, `AsyncClient` is awaited. Both return the protobuf answers and let `grpc.RpcError` through:

    from radixkv.service.client import Client, Retention

    with Client("127.0.0.1:50051") as client:
        answer = client.prefill([1, 2, 3], tenant="acme", retention=Retention(priority=80, ttl_s=3600))
        print(answer.usage.cached_tokens, answer.next_token_id)
"""

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.retention import Retention
from radixkv.service.client.async_client import AsyncClient
from radixkv.service.client.client import Client
from radixkv.service.client.requests import logits_of
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.prefill_pb2 import KVSource

__all__ = [
    "AsyncClient",
    "Client",
    "Compression",
    "CompressionPolicy",
    "KVSource",
    "Retention",
    "Tokenizer",
    "logits_of",
]
