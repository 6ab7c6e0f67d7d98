"""Sessions, hints and explanations over HTTP: how requests name a session, and what responses report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from radixkv.service.client import Awaits, Client
from radixkv.v1.cache_pb2 import SessionStats
from tests.patience import PATIENCE_S
from tests.service.text.tool_templates import HERMES
from tests.whole.http_server import anthropic_client, openai_client, serving_http, write_model

pytestmark = pytest.mark.usefixtures("forked_servers")

TOOL: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
MODEL = ""  # the model that is served
SCHEMA_OF_ONE: Any = {"type": "json_schema", "json_schema": {"name": "one", "schema": {"enum": [1]}}}
MESSAGES: Any = [{"role": "user", "content": "What time is it?"}]


class Service(NamedTuple):
    """Clients of one server: OpenAI's, Anthropic's, and over gRPC."""

    gpt: openai.OpenAI
    claude: anthropic.Anthropic
    grpc: Client

    def session(self) -> SessionStats:
        """Return the session that was used last."""
        (session,) = self.grpc.stats(max_sessions=1).sessions
        return session


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, HERMES)
    with (
        serving_http("--model", str(directory)) as (url, address),
        openai_client(url) as gpt,
        anthropic_client(url) as claude,
        Client(address, timeout_s=PATIENCE_S) as grpc,
    ):
        yield Service(gpt, claude, grpc)


@pytest.fixture(autouse=True)
def _empty_cache(service: Service) -> None:
    service.grpc.purge(everything=True)


def chat(service: Service, **options: Any) -> Any:
    """Make a chat completion with OpenAI's client."""
    defaults = {"messages": MESSAGES, "max_tokens": 4}
    return service.gpt.chat.completions.create(model=MODEL, **{**defaults, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"extra_body": {"session_id": "build-42"}},
        {"extra_headers": {"x-session-id": "build-42"}},
        {"extra_headers": {"x-claude-code-session-id": "build-42"}},
        {"extra_headers": {"session_id": "build-42"}},
        {"extra_body": {"session_id": "build-42"}, "extra_headers": {"x-session-id": "other"}},
    ],
    ids=["body", "x-session-id", "Claude Code", "session_id", "the body before a header"],
)
def test_a_request_names_its_session(service: Service, options: dict[str, Any]) -> None:
    chat(service, **options)
    assert service.session().session_id == "build-42"


@pytest.mark.parametrize(
    "user", ["user_1f_account__session_build-42", json.dumps({"session_id": "build-42"})], ids=["text", "JSON"]
)
def test_claude_code_names_its_session_in_the_user_id(service: Service, user: str) -> None:
    service.claude.messages.create(model=MODEL, max_tokens=4, messages=MESSAGES, metadata={"user_id": user})
    assert service.session().session_id == "build-42"


@pytest.mark.parametrize(
    ("options", "awaits"),
    [
        ({"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}, Awaits.TOOL),
        ({"response_format": SCHEMA_OF_ONE, "max_tokens": 60}, Awaits.USER),
        ({"response_format": SCHEMA_OF_ONE, "max_tokens": 60, "tools": [TOOL]}, Awaits.USER),
        ({"extra_body": {"ignore_eos": True}}, Awaits.UNKNOWN),
    ],
    ids=["tool call", "whole answer", "whole answer with tools", "cut off"],
)
def test_the_end_of_an_answer_decides_what_the_session_waits_for(
    service: Service, options: dict[str, Any], awaits: Awaits
) -> None:
    body = {"session_id": "s", **options.pop("extra_body", {})}
    chat(service, extra_body=body, **options)
    assert service.session().awaits == awaits


def test_hints_are_applied_and_answered_in_the_usage(service: Service) -> None:
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": {"priority": 70}}
    invalid_action = {**action, "action_id": "b", "payload": {"priority": 700}}
    hints = {"protocol_version": "1.0", "message_id": "m", "actions": [action, invalid_action]}
    answer = chat(service, extra_body={"kv_hints": hints})
    accepted, refused = answer.usage.model_extra["kv_hints"]
    assert (accepted["action_id"], accepted["status"], accepted["reason"]) == ("a", "accepted", None)
    assert accepted["tokens"] > 0
    assert refused["status"] == "refused"
    assert refused["reason"] == "payload: retention.priority: expected 0 to 100, got 700"
    message = service.claude.messages.create(
        model=MODEL, max_tokens=4, messages=MESSAGES, extra_body={"kv_hints": hints}
    )
    assert [each["status"] for each in message.usage.model_extra["kv_hints"]] == ["accepted", "refused"]


@pytest.mark.parametrize("hints", [3, {"actions": 3}, {"action": []}])
def test_hints_that_are_no_envelope_are_refused(service: Service, hints: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="kv_hints: expected the fields of a KvHintsEnvelope"):
        chat(service, extra_body={"kv_hints": hints})


def test_an_explanation_of_the_prompt_is_in_the_usage_of_each_api(service: Service) -> None:
    rules = " ".join(f"Rule {number}: be kind." for number in range(30))

    def messages(time: str) -> Any:
        return [{"role": "user", "content": f"It is {time}. {rules}"}]

    chat(service, messages=messages("10:31"))
    answer = chat(service, messages=messages("10:47"), extra_body={"explain": True})
    explanation = answer.usage.model_extra["explanation"]
    assert explanation["prompt_tokens"] == answer.usage.prompt_tokens
    assert (explanation["cached_tokens"], explanation["miss_reason"]) == (explanation["left_at_token"], "diverged")
    difference = explanation["difference"]
    assert difference["kind"] == "date_or_time"
    assert difference["prompt"]["different_text"] in "10:47"
    assert difference["branch"]["different_text"] in "10:31"
    assert 0 < difference["lost_tokens"] < explanation["computed_tokens"] <= answer.usage.prompt_tokens

    claude = service.claude.messages.create(
        model=MODEL, max_tokens=4, messages=messages("10:53"), extra_body={"explain": True}
    )
    assert claude.usage.model_extra["explanation"]["difference"]["kind"] == "date_or_time"
    response = service.gpt.responses.create(
        model=MODEL, max_output_tokens=16, input=messages("11:59"), extra_body={"explain": True}
    )
    assert response.usage is not None
    assert response.usage.model_extra["explanation"]["difference"]["kind"] == "date_or_time"
    chunks = list(
        chat(
            service,
            messages=messages("12:05"),
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"explain": True},
        )
    )
    assert chunks[-1].usage.model_extra["explanation"]["difference"]["kind"] == "date_or_time"
    assert "explanation" not in chat(service).usage.model_extra
    with pytest.raises(openai.BadRequestError, match="explain"):
        chat(service, extra_body={"explain": 3})
