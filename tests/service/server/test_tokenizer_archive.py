import hashlib
import io
import os
import zipfile

import pytest

from radixkv.errors import UnknownTokenizer
from radixkv.service.server.tokenizer_archive import NAMES, tokenizer_archive
from radixkv.service.text.tokenizer import Tokenizer
from tests.service.text.tokenizers import byte_level, write_without_json


def names_in(archive):
    return zipfile.ZipFile(io.BytesIO(archive)).namelist()


def test_the_archive_has_what_a_tokenizer_is_loaded_from_and_nothing_else(tmp_path):
    for name in NAMES:
        (tmp_path / name).write_text(name)
    for other in ("model.safetensors", "modeling_mine.py", "README.md"):
        (tmp_path / other).write_text("secret")
    (tmp_path / "folder").mkdir()
    archive = tokenizer_archive(tmp_path)
    assert names_in(archive) == sorted(NAMES)
    assert len(NAMES) <= 50, "routers take no more"
    assert b"secret" not in archive
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() is None


def test_equal_files_give_equal_bytes_whatever_their_times_and_modes(tmp_path):
    archives = []
    for number, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        for name in ("tokenizer.json", "config.json"):
            (folder / name).write_text("{}")
            (folder / name).chmod(0o600 + number)
            os.utime(folder / name, (number, number))
        archives.append(tokenizer_archive(str(folder)))
    assert archives[0] == archives[1]
    # The format of a zip file is fixed, so this digest is the same on every machine.
    assert hashlib.sha256(archives[0]).hexdigest() == "d3202f4215531cd0bca3001aad0e6023999cae6ec8044cc667ba1e0165f302fb"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json"])
def test_one_vocabulary_is_enough(tmp_path, name):
    """Files that can't be converted are sent unchanged."""
    (tmp_path / name).write_text("{}")
    assert names_in(tokenizer_archive(tmp_path)) == [name]


@pytest.mark.parametrize("names", [[], ["config.json", "tokenizer_config.json", "merges.txt"]])
def test_a_directory_without_a_vocabulary_is_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("{}")
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(UnknownTokenizer, match=r"tokenizer: the model's directory has none"):
        tokenizer_archive(tmp_path)


def test_templates_for_special_cases_are_in_the_archive(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    for name in ("tokenizer.json", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/code.py"):
        (tmp_path / name).write_text("x")
    assert names_in(tokenizer_archive(tmp_path)) == ["additional_chat_templates/tool_use.jinja", "tokenizer.json"]


def test_a_tokenizer_without_tokenizer_json_is_converted(tmp_path):
    write_without_json(tmp_path / "old")
    archive = tokenizer_archive(tmp_path / "old")
    assert names_in(archive) == ["chat_template.jinja", "config.json", "tokenizer.json", "tokenizer_config.json"]
    zipfile.ZipFile(io.BytesIO(archive)).extractall(tmp_path / "new")
    converted = Tokenizer.load(tmp_path / "new")
    chat = [{"role": "user", "content": "Größe 🎉"}]
    assert converted.encode_chat(chat) == byte_level().encode_chat(chat)


def test_a_tokenizer_that_can_not_be_converted_is_sent_unchanged_with_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "vocab.txt").write_text("x")
    monkeypatch.setattr("radixkv.service.server.tokenizer_archive.converted_files", lambda _: None)
    assert names_in(tokenizer_archive(tmp_path)) == ["vocab.txt"]
    assert "so clients need transformers for text: tokenizer.json cannot represent it" in caplog.text
