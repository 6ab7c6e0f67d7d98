"""Requests of the Responses API, read as requests for chat completions."""

from __future__ import annotations

from typing import Any

import pytest

from radixkv.service.http.json_fields import Fields
from radixkv.service.http.responses_api import read_response

SUMMARY = [{"type": "summary_text", "text": "in short"}]
CONTENT = [{"type": "reasoning_text", "text": "Hm."}]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"summary": [], "content": CONTENT}, "Hm."),  # as this server returns it
        ({"summary": SUMMARY, "content": CONTENT}, "Hm."),
        ({"summary": SUMMARY}, "in short"),
    ],
)
def test_reasoning_of_an_earlier_response_belongs_to_its_answer(parts: dict[str, Any], text: str) -> None:
    reasoning = {"id": "rs_1", "type": "reasoning", "status": "completed", **parts}
    answer = {"role": "assistant", "content": "Hello."}
    question = {"role": "user", "content": "Hi."}
    prompt, _ = read_response(Fields({"input": [question, reasoning, answer, question]}))
    assert prompt.messages == [question, {**answer, "reasoning_content": text}, question]
