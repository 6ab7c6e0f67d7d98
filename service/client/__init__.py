"""Clients of the service. They need gRPC and numpy, and for text tokenizers and jinja2; neither torch nor the engine.

`Client` blocks, `AsyncClient` is awaited. Prompts are text or token ids. Both return protobuf messages, in chunks with
text where the prompt was text:

    from radixkv.service.client import Client, MissReason, Retention

    with Client("127.0.0.1:50051") as client:
        for chunk in client.generate("Once upon a time", max_new_tokens=20):
            print(chunk.text, end="")
        print(client.chat([{"role": "user", "content": "Hello"}]).read())
        answer = client.prefill([1, 2, 3], tenant="acme", retention=Retention(priority=80, ttl_s=3600))
        print(answer.usage.cached_tokens, answer.next_token_id, MissReason.Name(answer.miss_reason))

A call that fails raises a `ServiceError`. Its subclasses say how to go on; each is a `grpc.RpcError` as well:

    ServiceError
    ├── InvalidArgument        fix the request
    │   └── OutOfRange         follow events from 0 again
    ├── FailedPrecondition     ask for another configuration of the service or the tenant
    ├── NotFound               load the adapter, hold the lease, register the prefix first
    ├── Unimplemented          switch the feature on in the service's configuration
    ├── Unauthenticated        pass a valid token or certificate
    ├── PermissionDenied       use a credential that allows the call
    ├── ResourceExhausted      try again after `retry_after_s`
    │   └── MessageTooLarge    send or ask for less, or raise the limit
    ├── Unavailable            try again, or on another server
    │   └── ConnectError       check the address, TLS, and whether the server runs
    ├── DeadlineExceeded       allow more time with `timeout_s`
    ├── Cancelled              the call was cancelled
    ├── DataLoss               follow events from 0 again
    └── InternalError          read the server's log

`radixkv.service.client.errors` says more about each.
"""

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
from radixkv.v1.prefill_pb2 import FinishReason, KVSource, MissReason

__all__ = [
    "AsyncClient",
    "AsyncTextAnswer",
    "Cancelled",
    "Client",
    "Compression",
    "CompressionPolicy",
    "ConnectError",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "FinishReason",
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
