import asyncio
import hashlib
import io
import os
import shutil
import zipfile
from pathlib import Path

import grpc
import pytest

from radixkv.config.cache_directory import temporary_cache_directory
from radixkv.service.client import AsyncClient, Client, tokenizer_files
from radixkv.service.client.tokenizer_files import MAX_FILES, ArchiveReader, stored_files
from radixkv.v1.model_pb2 import TokenizerChunk
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "radixkv" / "tokenizers"


def zip_of(files, compression=zipfile.ZIP_STORED):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as zipped:
        for name, text in files.items():
            zipped.writestr(name, text)
    return data.getvalue()


def store(data, digest=None):
    """Receive an archive in two messages, and store its files; return their directory."""
    reader = ArchiveReader()
    reader.add(TokenizerChunk(data=data[:10]))
    reader.add(TokenizerChunk(data=data[10:], sha256=digest or hashlib.sha256(data).hexdigest()))
    return reader.store()


def test_files_are_stored_under_their_digest(folder):
    data = zip_of({"tokenizer.json": "{}", "chat_template.jinja": "x"}, zipfile.ZIP_DEFLATED)
    digest = hashlib.sha256(data).hexdigest()
    assert stored_files(digest) is None
    directory = store(data)
    assert directory == stored_files(digest) == folder / digest
    assert sorted(path.name for path in directory.iterdir()) == ["chat_template.jinja", "tokenizer.json"]
    assert store(data) == directory, "storing the files again, as another process may do, changes nothing"
    assert os.listdir(folder) == [digest], "nothing is left behind"


def test_chat_templates_are_stored_in_their_own_folder(folder):
    directory = store(zip_of({"tokenizer.json": "{}", "additional_chat_templates/tool_use.jinja": "x"}))
    assert (directory / "additional_chat_templates" / "tool_use.jinja").read_text() == "x"


def test_an_unwritable_cache_directory_is_replaced_by_a_temporary_one(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # even root cannot create a folder in a file
    data = zip_of({"tokenizer.json": "{}"})
    directory = store(data)
    assert (directory / "tokenizer.json").read_text() == "{}"
    assert store(data) == directory
    assert stored_files(hashlib.sha256(data).hexdigest()) is None
    shutil.rmtree(temporary_cache_directory())
    temporary_cache_directory.cache_clear()


def test_another_digest_is_refused(folder):
    data = zip_of({"tokenizer.json": "{}"})
    with pytest.raises(ValueError, match="tokenizer: expected a zip archive with the digest 0000"):
        store(data, "0" * 64)
    with pytest.raises(ValueError, match="expected a zip archive with the digest in the last message"):
        ArchiveReader().store()
    assert not folder.exists()


@pytest.mark.parametrize("digest", ["", "0" * 63, "../" + "0" * 61, "0" * 63 + "\n", "A" * 64])
def test_a_value_that_is_no_digest_is_refused(digest):
    with pytest.raises(ValueError, match="expected a digest of 64 hexadecimal digits"):
        stored_files(digest)


@pytest.mark.parametrize(
    "name",
    [
        "../tokenizer.json",
        "/etc/tokenizer.json",
        "a/tokenizer.json",
        "additional_chat_templates/a.json",
        "additional_chat_templates/../a.jinja",
        "additional_chat_templates/b/a.jinja",
        "a\\b.json",
        ".json",
        "code.py",
        "x.so",
        "a.json\n",
    ],
)
def test_names_that_lead_elsewhere_and_code_are_refused(folder, name):
    with pytest.raises(ValueError, match="tokenizer: expected plain names of data files, got "):
        store(zip_of({name: "x"}))
    assert os.listdir(folder) == []
    assert sorted(path.name for path in folder.parent.parent.rglob("*")) == ["radixkv", "tokenizers"]


def test_too_many_or_too_large_files_are_refused(folder, monkeypatch):
    with pytest.raises(ValueError, match="tokenizer: expected at most 50 files, got 51"):
        store(zip_of({f"{number}.json": "" for number in range(MAX_FILES + 1)}))
    monkeypatch.setattr(tokenizer_files, "MAX_BYTES", 2000)
    with pytest.raises(ValueError, match="tokenizer: the files in the zip archive are larger than 2000 bytes"):
        store(zip_of({"a.json": "x" * 1000, "b.json": "x" * 1001}, zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="tokenizer: the zip archive is larger than 2000 bytes"):
        store(bytes(2001))
    assert os.listdir(folder) == []


def test_a_broken_zip_is_refused(folder):
    data = bytearray(zip_of({"tokenizer.json": "text" * 100}, zipfile.ZIP_DEFLATED))
    data[45] ^= 255  # the second byte of the compressed file; its header has 30 bytes, its name 14
    for broken in (b"no zip at all", bytes(data)):
        with pytest.raises(ValueError, match=f"tokenizer: the {len(broken)} bytes"):
            store(broken)
    assert os.listdir(folder) == []


def test_a_relative_cache_home_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", "/nowhere")
    assert tokenizer_files._tokenizers_folder() == Path("/nowhere/.cache/radixkv/tokenizers")


def load_with_both_clients(model_path):
    """Return the tokenizers that both clients load from a server of this model."""

    def blocking(address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            return client.tokenizer()

    async def run():
        async with (
            serving(FakeEngine(), model_path=model_path) as (_, address),
            AsyncClient(address, timeout_s=PATIENCE_S) as client,
        ):
            return [await client.tokenizer(), await asyncio.to_thread(blocking, address)]

    return asyncio.run(run())


def test_both_clients_load_the_tokenizer_of_the_served_model(folder):
    for tokenizer in load_with_both_clients("tiny"):
        assert tokenizer.decode(tokenizer.encode("a prompt é")) == "a prompt é"
        assert tokenizer.has_chat_template
    assert len(os.listdir(folder)) == 1


def test_files_are_fetched_once(monkeypatch):
    load_with_both_clients("tiny")
    monkeypatch.setattr(ArchiveReader, "store", lambda _: pytest.fail("the files are stored already"))
    load_with_both_clients("tiny")


def test_a_model_without_a_tokenizer_is_not_found():
    with pytest.raises(grpc.RpcError) as caught:
        load_with_both_clients(None)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
