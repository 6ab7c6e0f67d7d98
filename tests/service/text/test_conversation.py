"""Conversations in the forms in which clients send them, over templates of the kinds that models have."""

import json

import pytest

from radixkv.service.text.chat_template import ChatTemplate

# Like the template of SmolLM2: it writes whatever a message contains.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Like the template of Qwen2.5: tools, tool calls as JSON, results of tools in messages of users.
QWEN = """{% if tools %}TOOLS {% for tool in tools %}{{ tool | tojson }}{% endfor %}

{% endif %}
{% for message in messages %}
{% if message.role == 'tool' %}user: <tool_response>{{ message.content }}</tool_response>
{% elif message.role == 'assistant' %}
assistant: {% if message.content %}{{ message.content }}{% endif %}
{% for call in message.tool_calls or [] %}
{% if call.function %}{% set call = call.function %}{% endif %}
<tool_call>{{ {'name': call.name, 'arguments': call.arguments} | tojson }}</tool_call>{% endfor %}

{% else %}{{ message.role }}: {{ message.content }}
{% endif %}
{% endfor %}
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"""
# Like the template of DeepSeek-V3: tool calls only where the content is null, and arguments as JSON text.
DEEPSEEK = """{% for message in messages %}
{% if message['role'] == 'assistant' and message['content'] is none %}
{% for tool in message['tool_calls'] %}{{ '<call>' + tool['function']['name'] + tool['function']['arguments'] }}
{% endfor %}
{% else %}{{ message['role'] + ': ' + message['content'] }}
{% endif %}
{% endfor %}"""
# Like the template of Qwen2-VL: a content is text or parts.
PARTS = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}
{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}

{% endfor %}"""
# Like the template of Qwen3: a content that is not text is left out.
ONLY_TEXT = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}
{% endif %}

{% endfor %}"""
USER = {"role": "user", "content": "Weather?"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Größe"}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "1", "content": "12 °C"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
HELLO = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]


def render(template, *messages, **arguments):
    return ChatTemplate(template, {}).render(messages, add_generation_prompt=False, **arguments)


@pytest.mark.parametrize("template", [CHATML, QWEN, DEEPSEEK, PARTS, ONLY_TEXT])
def test_a_content_of_null_is_empty(template):
    silent = {"role": "assistant", "content": None}
    assert render(template, USER, silent) == render(template, USER, {**silent, "content": ""})
    assert "None" not in render(template, USER, silent)
    assert render(template, USER, {"role": "assistant"}) == render(template, USER, silent)


def test_a_turn_of_tools_is_rendered_from_what_openai_returns():
    assert render(QWEN, USER, CALLING, ANSWER, tools=[TOOL]).split("\n") == [
        "TOOLS " + json.dumps(TOOL),
        "user: Weather?",
        'assistant: <tool_call>{"name": "weather", "arguments": {"city": "Größe"}}</tool_call>',
        "user: <tool_response>12 °C</tool_response>",
        "",
    ]


def test_arguments_may_be_an_object_text_or_nothing():
    for arguments, written in ({"a": 1}, '{"a": 1}'), ('{"a": 1}', '{"a": 1}'), ("", "{}"), ({}, "{}"):
        call = {"function": {"name": "f", "arguments": arguments}}
        assert f'"arguments": {written}}}' in render(QWEN, USER, {"role": "assistant", "tool_calls": [call]})
        assert f"<call>f{written}" in render(DEEPSEEK, USER, {"role": "assistant", "tool_calls": [call]})


@pytest.mark.parametrize("arguments", ["no JSON secret", "[1]", '"secret"', "[" * 100_000])
def test_arguments_that_are_no_json_object_are_refused_without_them(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    with pytest.raises(ValueError, match="expected a JSON object, got other text") as caught:
        render(QWEN, USER, {"role": "assistant", "tool_calls": [call]})
    assert str(caught.value).startswith("messages[1].tool_calls[0].function.arguments: ")
    assert "secret" not in str(caught.value)


def test_a_template_that_reads_null_and_text_gets_them():
    assert render(DEEPSEEK, USER, CALLING) == 'user: Weather?\n<call>weather{"city": "Größe"}\n'


def test_parts_are_passed_on_or_joined():
    assert render(PARTS, {"role": "user", "content": HELLO}) == "user: Helloyou\n"
    for template in (CHATML, QWEN, DEEPSEEK, ONLY_TEXT):
        joined = render(template, {"role": "user", "content": "Hello\nyou"})
        assert render(template, {"role": "user", "content": HELLO}) == joined
        assert render(template, {"role": "user", "content": ["Hello", HELLO[1]]}) == joined


def test_parts_next_to_tool_calls_are_not_lost():
    calling = {"role": "assistant", "content": HELLO, "tool_calls": [CALL]}
    assert "assistant: Hello\nyou<tool_call>" in render(QWEN, USER, calling)


@pytest.mark.parametrize("content", [5, 0, True, {"a": 1}, {}])
def test_contents_of_other_types_are_refused(content):
    with pytest.raises(ValueError, match=r"^messages\[1\]\.content: expected text, .*, or null, got (int|b|d)"):
        render(CHATML, USER, {"role": "tool", "content": content})


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, 3, {"text": "x"}])
def test_parts_other_than_text_are_refused(part):
    with pytest.raises(ValueError, match=r"^messages\[0\]\.content\[1\](\.text)?: expected "):
        render(PARTS, {"role": "user", "content": [HELLO[0], part]})


@pytest.mark.parametrize(
    ("template", "messages", "arguments", "dropped"),
    [
        (CHATML, [USER], {"tools": [TOOL]}, "drops tools:"),
        (QWEN, [USER], {"documents": [{"text": "x"}]}, "drops documents:"),
        (CHATML, [USER, CALLING, ANSWER], {}, "drops tool_calls:"),
        (
            "{{ messages[-1].content }}",
            [{"role": "system", "content": "x"}, USER],
            {},
            "drops messages of the role system",
        ),
        (CHATML, [USER], {"variables": {"enable_thinking": True}}, "chat template has no variable enable_thinking"),
        (QWEN, [USER], {"variables": {"tools": [TOOL]}}, "tools must be passed as a separate argument"),
        (QWEN, [{"role": "assistant", "function_call": {"name": "f"}}], {}, r"function_call: expected tool_calls"),
    ],
)
def test_what_a_template_would_drop_is_refused(template, messages, arguments, dropped):
    with pytest.raises(ValueError, match=dropped):
        render(template, *messages, **arguments)


def test_empty_arguments_and_contents_are_accepted():
    assert render(CHATML, USER, tools=[], documents=[], variables={"enable_thinking": None}) == render(CHATML, USER)
    assert render(QWEN, {"role": "system", "content": ""}, USER)


def test_variables_reach_the_template():
    assert render(QWEN, USER, variables={"enable_thinking": False}).endswith("<think></think>")
    assert not render(QWEN, USER, variables={"enable_thinking": True}).endswith("<think></think>")


def test_a_role_that_was_written_in_one_form_is_still_checked_in_others():
    template = ChatTemplate(ONLY_TEXT, {})
    assert template.render([USER]) == "user: Weather?\n\n"
    assert template.render([{"role": "user", "content": HELLO}]) == "user: Hello\nyou\n\n"
    assert template.render([USER, USER]) == "user: Weather?\n\n" * 2


def test_a_conversation_of_a_known_shape_is_rendered_once(monkeypatch):
    template, rendered = ChatTemplate(QWEN, {}), []
    render = template._render

    def render_and_record(values):
        rendered.append(values)
        return render(values)

    monkeypatch.setattr(template, "_render", render_and_record)
    turns = [USER, CALLING, ANSWER]
    template.render(turns, tools=[TOOL])
    # The checks also render it without the tools, without the call, and with another content of each of two roles.
    assert len(rendered) == 1 + 4
    rendered.clear()
    longer = template.render([*turns, {**USER, "content": "And there?"}, CALLING, ANSWER], tools=[TOOL])
    assert len(rendered) == 1
    assert "And there?" in longer


def test_a_conversation_of_another_shape_is_checked():
    template = ChatTemplate(DEEPSEEK, {})
    template.render([USER, CALLING])
    with pytest.raises(ValueError, match="drops tool_calls"):
        template.render([USER, {**CALLING, "content": "I will look."}])


def test_messages_of_the_caller_are_not_changed():
    messages = [USER, {**CALLING, "content": HELLO}, ANSWER]
    before = json.dumps(messages)
    ChatTemplate(QWEN, {}).render(messages)
    assert json.dumps(messages) == before
