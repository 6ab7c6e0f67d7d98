"""Which part of a prompt differs from the previous prompt of its tenant."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from radixkv.service.http import cache_diagnostics
from radixkv.service.http.cache_diagnostics import CacheDiagnostics, PromptDifference, PromptParts

FIRST = PromptParts(
    model="m",
    system="Be brief.",
    tools=({"name": "a"},),
    messages=({"role": "user", "content": "Hello"},),
    documents=(),
    num_tokens=40,
)
NEXT = replace(FIRST, messages=(*FIRST.messages, {"role": "assistant", "content": "Hi"}), num_tokens=60)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, None),
        ({"model": "other"}, "model_changed"),
        ({"system": "Be long.", "tools": ()}, "system_changed"),
        ({"tools": ()}, "tools_changed"),
        ({"messages": ({"role": "user", "content": "Hello!"}, NEXT.messages[1])}, "messages_changed"),
        ({"messages": ()}, "messages_changed"),
        ({"documents": ({"text": "a"},)}, "messages_changed"),
    ],
)
def test_the_first_part_that_differs_is_reported(changes: dict[str, Any], kind: str | None) -> None:
    diagnostics = CacheDiagnostics()
    assert diagnostics.diagnose("a", "1", None, FIRST) is None
    difference = diagnostics.diagnose("a", "2", "1", replace(NEXT, **changes))
    assert difference == (None if kind is None else PromptDifference(kind, 40))


def test_a_prompt_of_another_tenant_is_not_found() -> None:
    diagnostics = CacheDiagnostics()
    diagnostics.diagnose("a", "1", None, FIRST)
    assert diagnostics.diagnose("b", "2", "1", FIRST) == PromptDifference("previous_message_not_found")


def test_old_prompts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_diagnostics, "_MAX_PROMPTS", 2)
    diagnostics = CacheDiagnostics()
    for number in range(3):
        diagnostics.diagnose("a", str(number), None, FIRST)
    assert diagnostics.diagnose("a", "3", "0", FIRST) == PromptDifference("previous_message_not_found")
    assert diagnostics.diagnose("a", "4", "2", FIRST) is None


def test_a_reason_counts_the_tokens_that_were_not_cached() -> None:
    assert PromptDifference("tools_changed", 40).reason(30) == {
        "type": "tools_changed",
        "cache_missed_input_tokens": 10,
    }
    assert PromptDifference("tools_changed", 40).reason(50) == {"type": "tools_changed", "cache_missed_input_tokens": 0}
    assert PromptDifference("previous_message_not_found").reason(0) == {"type": "previous_message_not_found"}
