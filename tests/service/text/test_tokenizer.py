import json
import sys
from functools import partial

import pytest

from radixkv.service.missing_package import MissingPackage
from radixkv.service.text.tokenizer import Tokenizer
from tests.service.command_line import launch
from tests.service.text.tokenizers import byte_fallback, byte_level


def test_text_becomes_tokens_and_text_again():
    tokenizer = byte_level()
    assert tokenizer.encode("~€") == [*"~€".encode()]
    assert tokenizer.decode(tokenizer.encode(" é , x .")) == " é , x .", "blanks are left alone"
    assert tokenizer.decode([510, *b"hi", 511]) == "hi"


def test_the_definition_is_that_of_the_package_tokenizers():
    assert json.loads(byte_level().definition)["model"]["type"] == "BPE"
    with pytest.raises(ValueError, match="expected a tokenizer of the package tokenizers, got another one"):
        _ = Tokenizer(object()).definition


def test_a_chat_ends_where_the_answer_begins():
    tokenizer = byte_level()
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert (token_ids[0], token_ids.count(510), token_ids.count(511)) == (510, 2, 1)
    assert tokenizer.decode(token_ids) == "user\nhi\nassistant\n"


def test_a_tokenizer_without_a_chat_template_refuses_a_chat():
    assert not byte_fallback().has_chat_template
    with pytest.raises(ValueError, match="expected a tokenizer with a chat template, got one without"):
        byte_fallback().encode_chat([{"role": "user", "content": "hi"}])


def test_what_a_template_refuses_is_said():
    class Model:
        chat_template = "x"

        def apply_chat_template(self, messages, **_):
            import jinja2

            raise jinja2.TemplateError("no system messages")

    with pytest.raises(ValueError, match="got its refusal: no system messages"):
        Tokenizer(Model()).encode_chat([{"role": "system", "content": "hi"}])


@pytest.mark.parametrize("files", [None, {}, {"config.json": '{"model_type": "llama"}'}, {"tokenizer.json": "no"}])
def test_a_directory_without_a_tokenizer_is_refused(tmp_path, files):
    directory = tmp_path / "nothing" if files is None else tmp_path
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"expected a directory with a tokenizer, got {directory}"):
        Tokenizer.load(directory)


def test_files_of_a_kind_that_needs_another_package_name_it(monkeypatch, tmp_path):
    for name in ("tokenizer.model", "config.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match=r"to read its tokenizer\.model, pip install sentencepiece"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("package", ["transformers", "jinja2"])
def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, package):
    tokenizer = byte_level()
    monkeypatch.setitem(sys.modules, package, None)
    call = partial(tokenizer.encode_chat, []) if package == "jinja2" else partial(Tokenizer.load, tmp_path)
    with pytest.raises(MissingPackage, match=rf"the package {package} is missing; .* pip install '\.\[text\]'"):
        call()


def test_nothing_is_imported_before_a_tokenizer_is_loaded():
    program = "import sys, radixkv.service.text.tokenizer; sys.exit('transformers' in sys.modules)"
    assert launch("-P", "-c", program) == (0, "", "")
