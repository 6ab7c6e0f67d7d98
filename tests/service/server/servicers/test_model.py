import asyncio
import hashlib

import grpc

from radixkv.service.server.servicers.model import CHUNK_BYTES
from radixkv.service.server.tokenizer_archive import tokenizer_archive
from radixkv.v1.model_pb2 import GetTokenizerRequest
from radixkv.v1.model_pb2_grpc import ModelServiceStub
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import refusal_of, serving


async def chunks_of(stub):
    return [chunk async for chunk in stub.GetTokenizer(GetTokenizerRequest(), timeout=PATIENCE_S)]


def run_with_stub(model_path, talk=chunks_of):
    """Return the result of `talk(stub)` with a running server of a model."""

    async def run():
        async with (
            serving(FakeEngine(), model_path=model_path) as (_, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            return await talk(ModelServiceStub(channel))

    return asyncio.run(run())


def test_the_files_come_in_pieces_and_the_digest_with_the_last_one(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "config.json").write_text("{}")
    chunks = run_with_stub(str(tmp_path))
    data = b"".join(chunk.data for chunk in chunks)
    assert data == tokenizer_archive(tmp_path)
    assert len(chunks) == -(-len(data) // CHUNK_BYTES) > 3
    assert {len(chunk.data) for chunk in chunks[:-1]} == {CHUNK_BYTES}
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]


def test_the_embedded_model_has_a_tokenizer():
    chunks = run_with_stub("tiny")
    assert hashlib.sha256(b"".join(chunk.data for chunk in chunks)).hexdigest() == chunks[-1].sha256


def test_the_digest_can_be_requested_alone():
    async def ask(stub):
        request = GetTokenizerRequest(digest_only=True)
        return [chunk async for chunk in stub.GetTokenizer(request, timeout=PATIENCE_S)]

    (alone,) = run_with_stub("tiny", ask)
    assert (alone.data, alone.sha256) == (b"", run_with_stub("tiny")[-1].sha256)


def test_a_model_without_a_tokenizer_is_not_found(tmp_path):
    async def refused(stub):
        return await refusal_of(chunks_of(stub))

    for model_path in (str(tmp_path), None):
        error = run_with_stub(model_path, refused)
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert error.details().startswith("tokenizer: the ")
