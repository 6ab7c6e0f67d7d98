"""Why a message of Anthropic's API could not reuse the prompt of an earlier one, as its field `diagnostics` reports."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_MAX_PROMPTS = 16_384


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The parts of a prompt.

    Attributes:
        model: name of the model or adapter.
        system: content of the system prompt; None without one.
        tools: the definitions of the tools.
        messages: the conversation without the system prompt.
        documents: plain-text documents, which belong to the messages.
        num_tokens: tokens of the prompt.
    """

    model: str
    system: Any
    tools: Sequence[Any]
    messages: Sequence[Any]
    documents: Sequence[Any]
    num_tokens: int

    def digest_of_messages(self, num_messages: int) -> bytes:
        """Return a digest of the documents and the first messages."""
        return _digest([self.documents, self.messages[:num_messages]])


@dataclass(frozen=True, slots=True)
class _PromptDigests:
    """What is remembered of a prompt: its model, digests of its parts, and the numbers of its messages and tokens."""

    model: str
    system: bytes
    tools: bytes
    messages: bytes
    num_messages: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PromptDifference:
    """The first part of a prompt that differs from the previous one.

    Attributes:
        kind: what differs, by its name in Anthropic's API, or `previous_message_not_found`.
        num_tokens: tokens of the previous prompt; None if it is not known.
    """

    kind: str
    num_tokens: int | None = None

    def reason(self, num_cached: int) -> dict[str, Any]:
        """Return the field `cache_miss_reason`.

        Args:
            num_cached: tokens of the prompt that were cached.
        """
        if self.num_tokens is None:
            return {"type": self.kind}
        return {"type": self.kind, "cache_missed_input_tokens": max(0, self.num_tokens - num_cached)}


class CacheDiagnostics:
    """Compares prompts with earlier ones of the same tenant. It remembers digests of a bounded number of prompts.

        message 1 ─▶ digests ─────────────────────────────┐
        message 2, with previous_message_id ─▶ digests ─▶ compared ─▶ the first part that differs

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests_by_message: OrderedDict[tuple[str, str], _PromptDigests] = OrderedDict()

    def diagnose(
        self, tenant: str, message_id: str, previous_id: str | None, prompt: PromptParts
    ) -> PromptDifference | None:
        """Compare a prompt with the previous one, and remember it.

        Args:
            tenant: tenant that sent both prompts.
            message_id: the id of the answer.
            previous_id: the id of the answer to the previous prompt; None if the request names none.
            prompt: the prompt.

        Returns:
            What differs, or that the previous prompt is not known; None if nothing differs, or without `previous_id`.
        """
        digests = _PromptDigests(
            prompt.model,
            _digest(prompt.system),
            _digest(prompt.tools),
            prompt.digest_of_messages(len(prompt.messages)),
            len(prompt.messages),
            prompt.num_tokens,
        )
        with self._lock:
            previous = None if previous_id is None else self._digests_by_message.get((tenant, previous_id))
            self._digests_by_message[tenant, message_id] = digests
            if len(self._digests_by_message) > _MAX_PROMPTS:
                self._digests_by_message.popitem(last=False)
        if previous_id is None:
            return None
        if previous is None:
            return PromptDifference("previous_message_not_found")
        if digests.model != previous.model:
            kind = "model_changed"
        elif digests.system != previous.system:
            kind = "system_changed"
        elif digests.tools != previous.tools:
            kind = "tools_changed"
        elif prompt.digest_of_messages(previous.num_messages) != previous.messages:
            kind = "messages_changed"
        else:
            return None
        return PromptDifference(kind, previous.num_tokens)


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
