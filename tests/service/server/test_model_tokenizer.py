import hashlib

import pytest

from radixkv.errors import UnknownTokenizer
from radixkv.service.server import model_tokenizer as module
from radixkv.service.server.model_tokenizer import ModelTokenizer, files_of_model


def test_the_files_of_a_directory_are_where_they_are(tmp_path):
    with files_of_model(str(tmp_path)) as directory:
        assert directory == tmp_path
    assert tmp_path.is_dir()


def test_the_files_of_the_embedded_model_are_made_for_the_time():
    with files_of_model("tiny") as directory:
        assert sorted(path.name for path in directory.iterdir()) == [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    assert not directory.exists()


def test_files_are_read_once(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    tokenizer = ModelTokenizer(str(tmp_path))
    archive, digest = tokenizer.archive()
    assert digest == hashlib.sha256(archive).hexdigest()
    (tmp_path / "tokenizer.json").unlink()
    assert tokenizer.archive()[0] is archive


def test_a_refusal_is_not_kept(tmp_path):
    tokenizer = ModelTokenizer(str(tmp_path))
    with pytest.raises(UnknownTokenizer):
        tokenizer.archive()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer.archive()


def test_a_model_without_files_has_no_tokenizer():
    with pytest.raises(UnknownTokenizer, match="got a model without files"):
        ModelTokenizer(None).archive()


def test_the_embedded_model_has_the_same_files_everywhere():
    assert ModelTokenizer("tiny").archive() == ModelTokenizer("tiny").archive()


def test_the_tokenizer_is_loaded_once(monkeypatch):
    tokenizer = ModelTokenizer("tiny")
    assert tokenizer.load() is tokenizer.load()
    assert tokenizer.load().decode([104, 105]) == "hi"


def test_a_tokenizer_that_can_not_be_loaded_is_tried_once(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("no")
    tokenizer = ModelTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="expected a directory with a tokenizer"):
        tokenizer.load()
    monkeypatch.setattr(module.Tokenizer, "load", lambda *_: pytest.fail("again"))
    with pytest.raises(ValueError, match="expected a directory with a tokenizer"):
        tokenizer.load()
    with pytest.raises(ValueError, match="got a model without files"):
        ModelTokenizer(None).load()
