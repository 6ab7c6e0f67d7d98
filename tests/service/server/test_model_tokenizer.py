import asyncio
import hashlib
import threading

import pytest

from radixkv.errors import InvalidRequest, UnknownTokenizer
from radixkv.service.missing_package import MissingPackage
from radixkv.service.server import model_tokenizer as module
from radixkv.service.server.model_tokenizer import ModelTokenizer, files_of_model
from tests.patience import PATIENCE_S


def test_the_files_of_a_model_directory_are_used_in_place(tmp_path):
    with files_of_model(str(tmp_path)) as directory:
        assert directory == tmp_path
    assert tmp_path.is_dir()


def test_the_files_of_the_embedded_model_are_temporary():
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
    with pytest.raises(UnknownTokenizer, match="the served model has no files"):
        ModelTokenizer(None).archive()


def test_the_embedded_model_has_the_same_files_everywhere():
    assert ModelTokenizer("tiny").archive() == ModelTokenizer("tiny").archive()


def test_the_tokenizer_is_loaded_once():
    tokenizer = ModelTokenizer("tiny")
    assert tokenizer.load() is tokenizer.load()
    assert tokenizer.load().decode([104, 105]) == "hi"


@pytest.mark.parametrize("can_be_loaded", [True, False])
def test_callers_that_wait_for_the_tokenizer_take_one_thread(monkeypatch, can_be_loaded):
    may_load = threading.Event()

    def load(directory):
        may_load.wait(PATIENCE_S)
        if not can_be_loaded:
            raise ValueError("expected one, got none")
        return directory

    monkeypatch.setattr(module.Tokenizer, "load", load)

    async def run():
        tokenizer = ModelTokenizer("tiny")
        waiting = [asyncio.ensure_future(tokenizer.load_async()) for _ in range(40)]  # more than there are threads
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait_for(asyncio.to_thread(may_load.set), PATIENCE_S)
        cancelled, *others = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError)
        assert {isinstance(each, ValueError) for each in others} == {not can_be_loaded}
        assert len(set(map(str, others))) == 1

    asyncio.run(run())


def test_a_tokenizer_that_can_not_be_loaded_is_tried_once(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("no")
    tokenizer = ModelTokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="expected a directory with a tokenizer"):
        tokenizer.load()
    monkeypatch.setattr(module.Tokenizer, "load", lambda *_: pytest.fail("again"))
    with pytest.raises(ValueError, match="expected a directory with a tokenizer"):
        tokenizer.load()
    with pytest.raises(ValueError, match="the served model has no files"):
        ModelTokenizer(None).load()


def test_a_missing_package_is_named_in_the_log_and_refuses_only_what_needs_the_tokenizer(monkeypatch, caplog):
    def load(directory):
        raise MissingPackage("the package sentencepiece is missing", name="sentencepiece")

    monkeypatch.setattr(module.Tokenizer, "load", load)
    with pytest.raises(InvalidRequest, match="stop: the model has no tokenizer, which stop strings require"):
        asyncio.run(ModelTokenizer("tiny").require_async("stop", "stop strings require"))
    assert "the package sentencepiece is missing" in caplog.text


def test_each_failed_call_raises_an_exception_of_its_own():
    """An exception that is raised again keeps the frames of all earlier calls, and with them their requests, alive."""
    tokenizer = ModelTokenizer(None)
    errors = []
    for _ in range(3):
        with pytest.raises(ValueError, match="no tokenizer") as caught:
            tokenizer.load()
        errors.append(caught.value)
    assert len({id(each) for each in errors}) == 3
