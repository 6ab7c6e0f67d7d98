"""Clients of the service. They need gRPC and numpy, and for text tokenizers and jinja2; neither torch nor the engine.

`Client` blocks, `AsyncClient` is awaited. Prompts are text or token ids. Both return protobuf messages, in chunks with
text where the prompt was text, and let `grpc.RpcError` through:

    from radixkv.service.client import Client, MissReason, Retention

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_new_tokens=20):
            print(chunk.text, end="")
        print(client.chat([{"role": "user", "content": "Hello"}]).read())
        answer = client.prefill([1, 2, 3], tenant="acme", retention=Retention(priority=80, ttl_s=3600))
        print(answer.usage.cached_tokens, answer.next_token_id, MissReason.Name(answer.miss_reason))
"""

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.retention import Retention
from radixkv.service.client.async_client import AsyncClient
from radixkv.service.client.client import Client
from radixkv.service.client.requests import logits_of
from radixkv.service.client.text_answers import AsyncTextAnswer, TextAnswer, TextChunk
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.prefill_pb2 import FinishReason, KVSource, MissReason

__all__ = [
    "AsyncClient",
    "AsyncTextAnswer",
    "Client",
    "Compression",
    "CompressionPolicy",
    "FinishReason",
    "KVSource",
    "MissReason",
    "Retention",
    "TextAnswer",
    "TextChunk",
    "Tokenizer",
    "logits_of",
]
