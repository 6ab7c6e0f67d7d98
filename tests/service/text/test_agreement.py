"""Token ids, text and conversations are those of transformers, for tokenizers of all kinds and published templates."""

import datetime
import json
import random
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from radixkv.service.text.chat_template import ChatTemplate
from radixkv.service.text.tokenizer import Tokenizer
from tests.service.text.tokenizers import CORPUS, WRITERS, write_tiny

SPECIAL = ["<|im_start|>", "<|eot_id|>", "<s>", "</s>", "[CLS]", "[MASK]", "<tool>", "<think>", "<late>", "<image>"]
SPECIAL += ["<|extra|>", "<eos>", "<word>", "<|endoftext|>", "<0x41>"]
FIXED = ["", " ", "  two  blanks ", "\n", "a", " a", "▁", "\ufffd", "\x00", "it 's , n't . ' d", "日本語", "e\u0301"]


def random_texts(dice, count):
    alphabet = [*" \n\t.,'!?▁", *"abcxyz", "é", "日", "🎉", "\u200d", "ﬁ", *SPECIAL, *" ".join(CORPUS).split(" ")]
    return ["".join(dice.choice(alphabet) + dice.choice(["", " "]) for _ in range(30)) for _ in range(count)]


@pytest.fixture(scope="module", params=WRITERS)
def both(request, tmp_path_factory):
    """Return a tokenizer as this package and as transformers load it."""
    directory = WRITERS[request.param](tmp_path_factory.mktemp(request.param))
    return Tokenizer.load(directory), AutoTokenizer.from_pretrained(directory, local_files_only=True)


def test_token_ids_are_those_of_transformers(both):
    ours, theirs = both
    for text in [*FIXED, *random_texts(random.Random(1), 60)]:
        assert ours.encode(text) == theirs.encode(text), text


def test_text_is_that_of_transformers(both):
    ours, theirs = both
    dice = random.Random(2)
    encoded = [theirs.encode(text) for text in [*FIXED, *random_texts(dice, 40)]]
    random_ids = [[dice.randrange(len(theirs)) for _ in range(40)] for _ in range(40)]
    for token_ids in [*encoded, *random_ids]:
        assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


def test_text_that_comes_token_by_token_is_that_of_transformers(both):
    ours, theirs = both
    for text in [*FIXED, *random_texts(random.Random(3), 40)]:
        token_ids = theirs.encode(text)
        stream = ours.stream()
        pieces = [*map(stream.put, token_ids), stream.end()]
        assert "".join(pieces) == theirs.decode(token_ids, skip_special_tokens=True)


CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """{{ bos_token }}{% if not date_string is defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{% set loop_messages = messages %}
{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{% set content = content + message['content'] | trim + '<|eot_id|>' %}
{{ date_string }}{{ content }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""
TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.multi_step and message.role == "user" %}{%- set ns.multi_step = false %}{%- continue %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.reasoning_content is defined %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' }}{{- call.function.arguments | tojson(indent=2) }}{{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- else %}
        {{- message.role ~ ': ' ~ message.content }}
    {%- endif %}
{%- endfor %}
{%- for document in documents or [] %}{{ document.title }}: {{ document.text }}{% endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>' }}{%- endif %}
{%- set d = dict(a=1) %}{{ d | items | list | length }}
"""
TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA3, "Gemma": GEMMA, "tools": TOOLS}
CHATS = [
    [{"role": "user", "content": 'Hi <b>there</b> & "you" 日本 🎉'}],
    [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "c"}],
    [{"role": "user", "content": "no text", "name": None}, {"role": "assistant", "content": "", "reasoning": "why"}],
    [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "w", "arguments": {"city": "Größe"}}}],
        },
        {"role": "user", "content": "12 °C"},
    ],
]
TOOL = {"type": "function", "function": {"name": "weather", "description": "It's <hot> & äö", "parameters": {}}}


@pytest.fixture(scope="module", params=TEMPLATES)
def chatting(request, tmp_path_factory):
    """Return the tokenizers of this package and of transformers for a model with a template, and the template."""
    directory = write_tiny(tmp_path_factory.mktemp("chat"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATES[request.param], "bos_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return Tokenizer.load(directory), theirs, TEMPLATES[request.param]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_conversations_are_those_of_transformers(chatting, chat, add_generation_prompt):
    ours, theirs, template = chatting
    arguments = {"tools": [TOOL, TOOL], "documents": [{"title": "T", "text": "<x>"}]}
    variables = {"enable_thinking": False, "date_string": "1 Jan"}
    has_calls = any("tool_calls" in message for message in chat)
    for name, value in {"": None, **arguments, **variables}.items():  # none of them, or one
        argument = {name: value} if name in arguments else {}
        variable = {name: value} if name in variables else {}
        ours_options = {"add_generation_prompt": add_generation_prompt, **argument, "chat_template_kwargs": variable}
        theirs_options = {"add_generation_prompt": add_generation_prompt, **argument, **variable}

        # A template that does not mention what it is given would drop it; this package then refuses the conversation.
        given_names = [*argument, *variable, *(["tool_calls"] if has_calls else [])]
        if all(given_name in template for given_name in given_names):
            ids = ours.encode_chat(chat, **ours_options)
            text = theirs.apply_chat_template(chat, tokenize=False, **theirs_options)
            assert ids == theirs.encode(text, add_special_tokens=False)
        else:
            with pytest.raises(ValueError, match=r"drops (tools|documents|tool_calls):|template has no variable"):
                ours.encode_chat(chat, **ours_options)


@pytest.mark.parametrize(
    ("source", "messages", "message"),
    [
        (GEMMA, [{"role": "system", "content": "x"}], "rejects these messages: System role not supported"),
        (CHATML, [{"role": ["x"], "content": "y"}], "failed with TypeError"),
        (CHATML, [{"role": "user"}], "rejects these messages: .* has no attribute 'content'"),
        (CHATML, [], "expected at least one message, got none"),
        ("{{ ''.__class__.mro() }}", [{"role": "user"}], "rejects these messages: .* is unsafe"),
        ("{% set n = namespace(_x=1) %}", [{"role": "user"}], "rejects these messages: a name in a namespace"),
        ("{{ messages.append(1) }}", [{"role": "user"}], "rejects these messages: access to attribute 'append'"),
    ],
)
def test_the_error_of_a_template_does_not_contain_the_messages(source, messages, message):
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source, {}).render(messages)


def test_an_invalid_template_is_refused():
    with pytest.raises(ValueError, match="the model's chat template is not valid: "):
        ChatTemplate("{% if %}", {})


def test_templates_write_the_date_of_the_clock():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, lambda: datetime.datetime(2025, 2, 3))
    assert template.render([{"role": "user"}]) == "03 Feb 2025"


def test_messages_with_model_dump_are_accepted_and_other_objects_refused():
    message = SimpleNamespace(model_dump=lambda: {"role": "user", "content": "hi", "tool_calls": None})
    assert ChatTemplate("{{ messages }}", {}).render([message]) == "[{'role': 'user', 'content': 'hi'}]"
    with pytest.raises(TypeError, match="chat: expected text, numbers, lists and mappings, got object"):
        ChatTemplate(CHATML, {}).render([{"role": "user", "content": object()}])
    with pytest.raises(TypeError, match="messages: expected mappings with a role and content, got str"):
        ChatTemplate(CHATML, {}).render(["hi"])
