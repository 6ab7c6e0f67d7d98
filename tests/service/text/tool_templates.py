"""Small chat templates in the shape of families of models, with the format of calls that each of them writes.

In the parts that several templates share, words such as CALL and BEFORE are placeholders, which each template replaces.
"""

from __future__ import annotations

from tests.service.text.tool_texts import deepseek

_CHATML = """{%- if tools %}<|im_start|>system
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{% set call = call.function or call %}CALL{%
endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_PARAMETERS = (
    "{% for name, value in call.arguments.items() %}BEFORE{{ name }}BETWEEN"
    "{{ value if value is string else value | tojson }}AFTER{% endfor %}"
)

HERMES = _CHATML.replace(
    "CALL", '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}\n</tool_call>\n'
)
# Qwen 3: without reasoning, the prompt ends with an empty reasoning block.
QWEN3 = HERMES.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}",
)
# Qwen 3's models that always reason, and DeepSeek R1: the prompt ends with the beginning of reasoning. The comment in
# the template names the end tag, by which the format is recognized.
ALWAYS_THINKING = HERMES.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}{# ends with </think> #}"
)
QWEN3_CODER = _CHATML.replace(
    "CALL",
    "<tool_call>\n<function={{ call.name }}>\n"
    + _PARAMETERS.replace("BEFORE", "<parameter=").replace("BETWEEN", ">\n").replace("AFTER", "\n</parameter>\n")
    + "</function>\n</tool_call>\n",
)
GLM4 = _CHATML.replace(
    "CALL",
    "<tool_call>{{ call.name }}\n"
    + _PARAMETERS.replace("BEFORE", "<arg_key>")
    .replace("BETWEEN", "</arg_key>\n<arg_value>")
    .replace("AFTER", "</arg_value>\n")
    + "</tool_call>\n",
)
LLAMA3 = """<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>

Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}<|eot_id|>{% endif %}{% for message in messages %}<|start_header_id|>{{
"ipython" if message.role == "tool" else message.role }}<|end_header_id|>

{% if 'tool_calls' in message %}{% if message.tool_calls | length != 1 %}{{
raise_exception("This model only supports single tool-calls at once!") }}{% endif %}{{
'{"name": "' + message.tool_calls[0].function.name + '", ' }}{{ '"parameters": ' }}{{
message.tool_calls[0].function.arguments | tojson }}{{ "}" }}{% elif message.content is mapping %}{{
message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}{%
if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
_MISTRAL = """<s>{% if tools %}[AVAILABLE_TOOLS][{% for tool in tools %}{{ tool | tojson }}{%
endfor %}][/AVAILABLE_TOOLS]{% endif %}{% for message in messages %}{%
if message.role == "user" %}[INST]{{ message.content }}[/INST]{%
elif message.tool_calls %}CALLS</s>{%
elif message.role == "tool" %}{% if message.tool_call_id | length != 9 %}{{
raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}[TOOL_RESULTS]{"content": {{
message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]{%
else %}{{ message.content }}</s>{% endif %}{% endfor %}"""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """[TOOL_CALLS][{% for call in message.tool_calls %}{% if call.id | length != 9 %}{{
raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{% endif %}{{
(call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]""",
)
MISTRAL_ARGS = _MISTRAL.replace(
    "CALLS",
    "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}",
)
MAGISTRAL = MISTRAL_ARGS.replace(
    "<s>", "<s>[SYSTEM_PROMPT]Draft your thoughts first: [THINK]thoughts[/THINK][/SYSTEM_PROMPT]"
)
_DEEPSEEK = deepseek("""<|begin▁of▁sentence|>{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{%
for message in messages %}{% if message.role == "user" %}<|User|>{{ message.content }}{%
elif message.role == "tool" %}<|tool▁output▁begin|>{{ message.content }}<|tool▁output▁end|>{%
elif message.tool_calls %}<|Assistant|>{{ message.content or "" }}<|tool▁calls▁begin|>{%
for call in message.tool_calls %}CALL{% endfor %}<|tool▁calls▁end|><|end▁of▁sentence|>{%
else %}<|Assistant|>{{ message.content }}<|end▁of▁sentence|>{% endif %}{% endfor %}{%
if add_generation_prompt %}<|Assistant|>{% endif %}""")
DEEPSEEK_V3 = _DEEPSEEK.replace(
    "CALL",
    deepseek(
        "<|tool▁call▁begin|>function<|tool▁sep|>{{ call.function.name }}\n```json\n"
        "{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
        "\n```<|tool▁call▁end|>"
    ),
)
# DeepSeek V3.1 concatenates the arguments, so they must be JSON text.
DEEPSEEK_V31 = _DEEPSEEK.replace(
    "CALL",
    deepseek(
        "{{ '<|tool▁call▁begin|>' + call.function.name + '<|tool▁sep|>' + call.function.arguments }}<|tool▁call▁end|>"
    ),
).replace(
    deepseek("<|Assistant|>{% endif %}"),
    deepseek("<|Assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}"),
)
KIMI = _CHATML.replace(
    "CALL",
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ call.name }}:0<|tool_call_argument_begin|>"
    "{{ call.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
)
PYTHONIC = _CHATML.replace("# Tools", "# Tools: [func_name1(params_name1=params_value1), func_name2(params)]").replace(
    "CALL",
    "[{{ call.name }}({% for name, value in call.arguments.items() %}{{ name }}={{ value | tojson }}{%"
    " if not loop.last %}, {% endif %}{% endfor %})]",
)
FUNCTOOLS = _CHATML.replace("# Tools", "# Tools: functools[...]").replace(
    "CALL", 'functools[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]'
)
GRANITE = _CHATML.replace(
    "CALL", '<|tool_call|>[{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}]'
)
# Phi-4-mini: the tools are in the system message, and neither calls nor results have a form of their own.
PHI4_MINI = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and
message['tools'] is not none %}{{
'<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|><|end|>' }}{%
else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{%
if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{
"model" if message.role == "assistant" else message.role }}
{{ message.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

LFM2 = PYTHONIC.replace("[{{ call.name", "<|tool_call_start|>[{{ call.name").replace("%})]", "%})]<|tool_call_end|>")
NEMOTRON = FUNCTOOLS.replace("functools[...]", "").replace("functools[", "<TOOLCALL>[").replace("}]", "}]</TOOLCALL>")
SEED_OSS = (
    QWEN3_CODER.replace("tool_call>", "seed:tool_call>")
    .replace(">\n{{ value", ">{{ value")
    .replace("\n</parameter>", "</parameter>")
)
_VALUES = (
    "call:{{ call.name }}{{ '{' }}{% for name, value in call.arguments | dictsort %}{{ name }}:"
    "{{ 'QUOTE' + value + 'QUOTE' if value is string else value | tojson }}{% if not loop.last %},{% endif %}"
    "{% endfor %}{{ '}' }}"
)
GEMMA4 = _CHATML.replace("CALL", f"<|tool_call>{_VALUES}<tool_call|>".replace("QUOTE", '<|"|>'))
FUNCTIONGEMMA = _CHATML.replace(
    "CALL", f"<start_function_call>{_VALUES}<end_function_call>".replace("QUOTE", "<escape>")
)
# By the name of the family: the template, and the format of its calls.
TEMPLATES = {
    "hermes": (HERMES, "hermes"),
    "qwen3": (QWEN3, "hermes"),
    "always_thinking": (ALWAYS_THINKING, "hermes"),
    "qwen3_coder": (QWEN3_CODER, "qwen3_coder"),
    "glm4": (GLM4, "glm4"),
    "llama3": (LLAMA3, "llama3_json"),
    "mistral": (MISTRAL, "mistral"),
    "mistral_args": (MISTRAL_ARGS, "mistral_args"),
    "magistral": (MAGISTRAL, "mistral_args"),
    "deepseek_v3": (DEEPSEEK_V3, "deepseek_v3"),
    "deepseek_v31": (DEEPSEEK_V31, "deepseek_v31"),
    "kimi_k2": (KIMI, "kimi_k2"),
    "pythonic": (PYTHONIC, "pythonic"),
    "gemma4": (GEMMA4, "gemma4"),
    "functiongemma": (FUNCTIONGEMMA, "functiongemma"),
    "lfm2": (LFM2, "lfm2"),
    "nemotron": (NEMOTRON, "nemotron"),
    "seed_oss": (SEED_OSS, "seed_oss"),
    "functools": (FUNCTOOLS, "functools"),
    "phi4_mini": (PHI4_MINI, "phi4_mini"),
    "granite": (GRANITE, "phi4_mini"),
}
