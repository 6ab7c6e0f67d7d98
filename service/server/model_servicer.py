"""The gRPC service that hands out what belongs to the served model beside its weights: its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.unfinished_calls import Context
from radixkv.v1 import model_pb2, model_pb2_grpc

CHUNK_BYTES = 65_536


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Answers with the files of a model's tokenizer."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    async def GetTokenizer(  # noqa: N802
        self, request: model_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[model_pb2.TokenizerChunk]:
        """Stream the zip, and its digest with the last piece."""
        if request.digest_only:
            _, digest = await asyncio.to_thread(self._tokenizer.archive)
            yield model_pb2.TokenizerChunk(sha256=digest)
            return
        async for data, digest in pieces_of(self._tokenizer):
            yield model_pb2.TokenizerChunk(data=data, sha256=digest)


async def pieces_of(tokenizer: ModelTokenizer) -> AsyncIterator[tuple[bytes, str]]:
    """Yield the zip piece by piece; beside the last piece the digest of the whole, beside others an empty string.

    Raises:
        UnknownTokenizer: the model has none.
    """
    archive, digest = await asyncio.to_thread(tokenizer.archive)
    for start in range(0, len(archive), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield archive[start:end], digest if end >= len(archive) else ""
