"""The gRPC service that sends the tokenizer of the served model."""

from __future__ import annotations

from collections.abc import AsyncIterator

from radixkv.service.server.calls import Context
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.v1 import model_pb2, model_pb2_grpc

CHUNK_BYTES = 65_536


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """Sends the files of the model's tokenizer."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    async def GetTokenizer(  # noqa: N802
        self, request: model_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[model_pb2.TokenizerChunk]:
        """Stream the zip archive in chunks, with its digest in the last one; or only the digest, if requested."""
        if request.digest_only:
            _, digest = await self._tokenizer.archive_async()
            yield model_pb2.TokenizerChunk(sha256=digest)
            return
        async for data, digest in archive_chunks(self._tokenizer):
            yield model_pb2.TokenizerChunk(data=data, sha256=digest)


async def archive_chunks(tokenizer: ModelTokenizer) -> AsyncIterator[tuple[bytes, str]]:
    """Yield the chunks of the zip archive, the last one with its digest, the others with an empty string.

    Raises:
        UnknownTokenizer: the model has no tokenizer.
    """
    archive, digest = await tokenizer.archive_async()
    for start in range(0, len(archive), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield archive[start:end], digest if end >= len(archive) else ""
