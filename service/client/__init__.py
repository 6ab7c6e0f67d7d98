"""Python clients of the service. They need radixkv without extras, for text the extra `text`, and never torch.

`Client` is synchronous, `AsyncClient` is for asyncio. A prompt is text or token ids. Calls return protobuf messages;
for a text prompt, `generate` and `chat` return chunks with text:

    from radixkv.service.client import Client, MissReason, Retention

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_new_tokens=20):
            print(chunk.text, end="")
        print(client.chat([{"role": "user", "content": "Hello"}]).read())
        answer = client.prefill([1, 2, 3], tenant="acme", retention=Retention(priority=80, ttl_s=3600))
        print(answer.usage.cached_tokens, answer.next_token_id, MissReason.Name(answer.miss_reason))

A call that fails raises a subclass of `ServiceError`, which is also a `grpc.RpcError`. What to do about each:

    ServiceError
    ├── InvalidArgument        fix the request
    │   └── OutOfRange         subscribe to events from 0
    ├── FailedPrecondition     change the configuration of the service or the tenant
    ├── NotFound               load the adapter, hold the lease or register the prefix first
    ├── Unimplemented          enable the feature in the service's configuration
    ├── Unauthenticated        pass a valid token or certificate
    ├── PermissionDenied       use a credential that allows the call
    ├── ResourceExhausted      retry after `retry_after_s`, if that is not None
    │   └── MessageTooLarge    send or request less, or raise the limit
    ├── Unavailable            retry, or use another server
    │   └── ConnectError       check the address, TLS, and whether the server runs
    ├── DeadlineExceeded       allow more time with `timeout_s`
    ├── Cancelled              nothing: the call was cancelled, usually by this program
    ├── DataLoss               subscribe to events from 0
    └── InternalError          read the server's log

`radixkv.service.client.errors` describes each.
"""

from radixkv.api.awaits import Awaits
from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.retention import Retention
from radixkv.service.client.async_client import AsyncClient
from radixkv.service.client.client import Client
from radixkv.service.client.errors import (
    Cancelled,
    ConnectError,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    MessageTooLarge,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    ServiceError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from radixkv.service.client.requests import logits_of
from radixkv.service.client.text_answers import AsyncTextAnswer, TextAnswer, TextChunk
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.cache_pb2 import DifferenceKind
from radixkv.v1.hints_pb2 import HintStatus
from radixkv.v1.prefill_pb2 import FinishReason, KVSource, MissReason

__all__ = [
    "AsyncClient",
    "AsyncTextAnswer",
    "Awaits",
    "Cancelled",
    "Client",
    "Compression",
    "CompressionPolicy",
    "ConnectError",
    "DataLoss",
    "DeadlineExceeded",
    "DifferenceKind",
    "FailedPrecondition",
    "FinishReason",
    "HintStatus",
    "InternalError",
    "InvalidArgument",
    "KVSource",
    "MessageTooLarge",
    "MissReason",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "ResourceExhausted",
    "Retention",
    "ServiceError",
    "TextAnswer",
    "TextChunk",
    "Tokenizer",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "logits_of",
]
