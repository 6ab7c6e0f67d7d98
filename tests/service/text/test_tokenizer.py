import json
import sys
from unittest import mock

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from radixkv.service.missing_package import MissingPackage
from radixkv.service.text.reasoning import REASONING_FORMATS
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.text.tool_formats import TOOL_FORMATS
from radixkv.service.text.transformers_tokenizer import SlowBackend, converted_files
from tests.service.command_line import launch
from tests.service.text.tokenizers import byte_fallback, byte_level, write_files, write_tiny, write_without_json


def test_text_becomes_tokens_and_text_again():
    tokenizer = byte_level()
    assert tokenizer.encode("~€") == [*"~€".encode()]
    assert tokenizer.decode(tokenizer.encode(" é , x .")) == " é , x .", "blanks are left alone"
    assert tokenizer.decode([510, *b"hi", 511]) == "hi"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_bytes_of_tokens_are_those_of_the_text(make):
    tokenizer = make()
    text = "a€😀é"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == text
    assert any("\ufffd" in tokenizer.decode([each]) for each in ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_the_text_of_a_token_has_its_leading_space(make):
    tokenizer = make()
    ids = tokenizer.encode("Hello, world")
    assert "".join(map(tokenizer.token_text, ids)).lstrip() == "Hello, world"


def test_a_text_is_tokenized_once_for_its_ids_and_its_ends():
    tokenizer = byte_level()
    tokenizer._backend = mock.Mock(wraps=tokenizer._backend)
    # Each byte of "€" is a token that ends with the whole character, and <|im_end|> has ten characters.
    assert tokenizer.encode_with_ends("~€<|im_end|>x") == ([*"~€".encode(), 511, 120], [1, 2, 2, 2, 12, 13])
    assert tokenizer._backend.encode.call_count == 1


def test_the_definition_is_that_of_the_package_tokenizers():
    assert json.loads(byte_level().definition)["model"]["type"] == "BPE"
    with pytest.raises(ValueError, match="only transformers can run it"):
        _ = Tokenizer(SlowBackend(object())).definition


def test_a_chat_ends_where_the_answer_begins():
    tokenizer = byte_level()
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert (token_ids[0], token_ids.count(510), token_ids.count(511)) == (510, 2, 1)
    assert tokenizer.decode(token_ids) == "user\nhi\nassistant\n"


def test_the_token_that_a_template_writes_after_an_answer_is_the_turn_end():
    assert byte_level().turn_end() == ("<|im_end|>", 511)
    assert byte_fallback().turn_end() is None, "there is no template"


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}{{ m.content }} <|im_end|>{% endfor %}", ("<|im_end|>", 511)),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        ("{% for m in messages %}{{ m.content }}END{% endfor %}", None),
        ("{% for m in messages %}<|im_end|>{% endfor %}", None),
        ("{{ raise_exception('never') }}", None),
        ("{% if %}", None),
    ],
)
def test_only_a_special_token_directly_after_the_answer_ends_it(tmp_path, template, end):
    directory = write_tiny(tmp_path / "model")
    for file in directory.glob("chat_template*"):
        file.unlink()
    (directory / "chat_template.jinja").write_text(template)
    assert Tokenizer.load(directory).turn_end() == end


def test_a_tokenizer_without_a_chat_template_refuses_a_chat():
    assert not byte_fallback().has_chat_template
    with pytest.raises(ValueError, match="expected a tokenizer with a default chat template, got none"):
        byte_fallback().encode_chat([{"role": "user", "content": "hi"}])


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


CHAT = [{"role": "user", "content": "hi"}]


def _template_naming(source):
    """Return a template that writes the name of its source, and the message."""
    return source + " {{ messages[0].content }}"


@pytest.mark.parametrize(
    ("files", "source"),
    [
        ({"chat_template.jinja": _template_naming("file")}, "file"),
        ({"chat_template.json": json.dumps({"chat_template": _template_naming("processor")})}, "settings"),
        (
            {
                "tokenizer_config.json": "{}",
                "chat_template.json": json.dumps({"chat_template": _template_naming("processor")}),
            },
            "processor",
        ),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "default", "template": _template_naming("list")}]}
                )
            },
            "list",
        ),
        ({"additional_chat_templates/default.jinja": _template_naming("folder")}, "folder"),
    ],
)
def test_the_chat_template_is_found_where_models_have_it(tmp_path, files, source):
    write_tiny(tmp_path)
    settings = {
        **json.loads((tmp_path / "tokenizer_config.json").read_text()),
        "chat_template": _template_naming("settings"),
    }
    for name, text in {"tokenizer_config.json": json.dumps(settings), **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == f"{source} hi"


def test_a_model_with_several_templates_has_one_for_tools(tmp_path):
    write_tiny(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(
        "{{ tools[0].name }}: {{ messages[0].content }}"
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(CHAT)) == "hi"
    assert tokenizer.decode(tokenizer.encode_chat(CHAT, tools=[{"name": "weather"}])) == "weather: hi"
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="expected a tokenizer with a default chat template, got only tool_use"):
        Tokenizer.load(tmp_path).encode_chat(CHAT)


def test_text_that_utf_8_can_not_express_is_refused_without_it():
    with pytest.raises(ValueError, match=r"^expected text in Unicode, got lone surrogates$"):
        byte_level().encode("secret\ud800")


def test_files_without_tokenizer_json_are_read_by_transformers_and_converted(tmp_path):
    tokenizer = Tokenizer.load(write_without_json(tmp_path / "old"))
    (tmp_path / "new").mkdir()
    for name, content in converted_files(tmp_path / "old").items():
        (tmp_path / "new" / name).write_bytes(content)
    converted = Tokenizer.load(tmp_path / "new")
    for text in ("", "Hello, é world 🎉", "<|im_start|>user\n hi"):
        assert converted.encode(text) == tokenizer.encode(text) == byte_level().encode(text)
        assert converted.decode(converted.encode(text)) == byte_level().decode(byte_level().encode(text))
    assert converted.encode_chat(CHAT) == tokenizer.encode_chat(CHAT) == byte_level().encode_chat(CHAT)


def test_a_tokenizer_in_python_is_served_through_transformers(tmp_path):
    """Some tokenizers exist only in Python. transformers gives them the same methods as others, in another class."""

    class SlowTokenizer:
        """Stands in for such a tokenizer of transformers: a token per byte, and 1 for the beginning."""

        chat_template = "{{ bos_token }}{{ messages[0].content }}"
        special_tokens_map = {"bos_token": "<s>"}  # noqa: RUF012
        clean_up_tokenization_spaces = True
        added_tokens_decoder = {}  # noqa: RUF012

        def encode(self, text, add_special_tokens=True):
            return [*([1] if add_special_tokens else []), *text.encode()]

        def decode(self, token_ids, **_):
            return bytes(each for each in token_ids if each > 1).decode("utf-8", "replace")

    with mock.patch("radixkv.service.text.tokenizer.load_with_transformers", return_value=SlowTokenizer()):
        tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("hé") == [1, *"hé".encode()]
    assert tokenizer.encode_chat(CHAT) == [*b"<s>hi"]
    stream = tokenizer.stream()
    assert [*map(stream.put, [1, *"a é .".encode()]), stream.end()] == ["", "a", "", "", " é", "", ".", ""]


@pytest.mark.parametrize(
    ("package", "call", "extra"),
    [
        ("tokenizers", lambda directory: Tokenizer.load(write_tiny(directory)), "text"),
        ("jinja2", lambda _: byte_level().encode_chat(CHAT), "text"),
        ("transformers", Tokenizer.load, "engine"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path, package, call, extra):
    byte_level()  # is cached, so it needs no package later
    for module in [name for name in sys.modules if name.startswith("radixkv.service.text.")]:
        if module.endswith(("chat_template", "tokenizer_directory")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf"the package {package} is missing; .* pip install '\.\[{extra}\]'"):
        call(tmp_path)


def test_text_needs_neither_torch_nor_transformers(tmp_path):
    write_tiny(tmp_path)
    program = (
        "import sys; from radixkv.service.text.tokenizer import Tokenizer\n"
        "assert not {'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "tokenizer = Tokenizer.load(sys.argv[1])\n"
        "print(tokenizer.decode(tokenizer.encode_chat([{'role': 'user', 'content': 'hi'}])))\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    assert launch("-P", "-c", program, str(tmp_path)) == (0, "user\nhi\nassistant\n\n", "")


def test_the_tags_of_an_answer_may_be_special_tokens(tmp_path):
    rust = RustTokenizer(models.BPE({"a": 0, "b": 1}, []))
    rust.add_special_tokens(["[TOOL_CALLS]", "[THINK]", "<s>"])
    write_files(tmp_path, rust, {"chat_template": "[TOOL_CALLS]{{ messages }}[/THINK]"})
    tokenizer = Tokenizer.load(tmp_path)
    form = tokenizer.answer_format()
    assert (form.tool_format, form.reasoning) == (TOOL_FORMATS["mistral"], REASONING_FORMATS["mistral"])
    assert form.tags == {"[TOOL_CALLS]": 2, "[THINK]": 3}
    shown = {token_id: tag for tag, token_id in form.tags.items()}
    stream = tokenizer.stream((), shown)
    assert [stream.put(token_id) for token_id in (0, 2, 4, 1)] == ["a", "[TOOL_CALLS]", "", "b"]
    chosen = tokenizer.answer_format("hermes", "none")
    assert (chosen.tool_format, chosen.reasoning, chosen.tags) == (TOOL_FORMATS["hermes"], None, {})


def test_special_tokens_have_texts_if_they_are_shown(tmp_path):
    tokenizer = Tokenizer.load(write_tiny(tmp_path / "tiny"))
    assert tokenizer.special_tokens == {509: "<|endoftext|>", 510: "<|im_start|>", 511: "<|im_end|>"}
    stream = tokenizer.stream((), tokenizer.special_tokens)
    assert "".join(map(stream.put, [*tokenizer.encode("Hi"), 511])) == "Hi<|im_end|>"


def test_a_response_template_shows_the_format_of_answers(tmp_path):
    template = {"fields": {"thinking": {"open": "<think>", "close": "</think>"}, "tool_calls": {"open": "<tool_call>"}}}
    write_files(
        tmp_path, RustTokenizer(models.BPE({"a": 0}, [])), {"chat_template": "a", "response_template": template}
    )
    form = Tokenizer.load(tmp_path).answer_format()
    assert (form.tool_format, form.reasoning) == (TOOL_FORMATS["hermes"], REASONING_FORMATS["think"])
