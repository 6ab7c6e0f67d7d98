import json
import os

import pytest

pytest.importorskip("gguf")

from radixkv.config import Config
from radixkv.model_files.gguf_directory import gguf_directory
from radixkv.service.cli.main import main
from radixkv.service.server.gateway.descriptions import model_info
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.text.tokenizer import Tokenizer
from tests.model_files.gguf_models import random_model, write_gguf
from tests.service.command_line import launch
from tests.service.fake_engine import LIMITS
from tests.service.text.tokenizers import byte_level


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    return write_gguf(tmp_path / "model.gguf", random_model("qwen2", num_hidden_layers=1), "qwen2")


def test_the_files_of_a_model_directory_are_made_once(file, cache):
    directory = gguf_directory(file)
    assert directory.parent == cache / "radixkv" / "gguf"
    names = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(each.name for each in directory.iterdir()) == names
    (directory / "mark").write_text("")
    assert (gguf_directory(file) / "mark").exists()
    assert [*directory.parent.iterdir()] == [directory]


def test_a_file_that_was_replaced_gets_a_new_directory(file):
    before = gguf_directory(file)
    write_gguf(file, random_model("qwen2", num_hidden_layers=2), "qwen2")
    after = gguf_directory(file)
    assert before != after
    assert json.loads((after / "config.json").read_text())["num_hidden_layers"] == 2


def test_without_a_writable_cache_another_directory_is_used(file, cache):
    cache.write_text("a file")
    directory = gguf_directory(file)
    assert Tokenizer.load(directory).encode("Hello") == byte_level().encode("Hello")
    assert cache not in directory.parents


def test_a_client_reads_the_tokenizer_of_a_gguf_file_without_torch(file):
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['gguf'] = None; "
        "from radixkv.service.text.tokenizer import Tokenizer; "
        "print(Tokenizer.load(sys.argv[1]).encode('Hello, world'))"
    )
    code, out, err = launch("-P", "-c", program, str(file))
    assert (code, err) == (0, "")
    assert json.loads(out) == byte_level().encode("Hello, world")


def test_a_server_sends_the_tokenizer_of_a_gguf_file(file):
    tokenizer = ModelTokenizer(str(file))
    assert tokenizer.load().encode("Hello") == byte_level().encode("Hello")
    assert b"chat_template.jinja" in tokenizer.archive()[0]


def test_a_gateway_gets_the_directory_with_the_tokenizer(file):
    config = Config.load(None, [f"model.path={json.dumps(str(file))}"])
    info = model_info(LIMITS, [7], config)
    assert (info.model_path, info.model_type) == (str(file), "qwen2")
    assert os.path.isfile(f"{info.tokenizer_path}/tokenizer.json")


def test_a_command_reports_what_is_wrong_with_a_tokenizer(tmp_path, capsys):
    (tmp_path / "bad.gguf").write_text("text")
    for source, message in {
        "bad.gguf": "--tokenizer: expected a GGUF file of a language model, got ",
        "none.gguf": "--tokenizer: expected a GGUF file, got ",
        "": "--tokenizer: expected a directory with a tokenizer, got ",
    }.items():
        arguments = ["prefill", "--address", "127.0.0.1:1", "--text", "a", "--tokenizer", str(tmp_path / source)]
        assert main(arguments) == 2
        assert f"radixkv: {message}" in capsys.readouterr().err
    assert main(["prefill", "--address", "127.0.0.1:1", "--text", "a", "--tokenizer", "org/none"]) == 2
    assert "to download it, hf download org/none" in capsys.readouterr().err
