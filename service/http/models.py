"""The served model, as `GET /v1/models` describes it to clients of both APIs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from radixkv.api.limits import Limits
from radixkv.errors import InvalidRequest

_MAX_PAGE_SIZE = 1000


class Models:
    """Describes the served model, which counts as created when the server starts.

    Args:
        limits: limits of the engine.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._start = datetime.now(UTC).replace(microsecond=0)

    @property
    def name(self) -> str:
        """The name of the model."""
        return self._limits.model

    def openai_list(self) -> dict[str, Any]:
        """Return the list in OpenAI's form."""
        return {"object": "list", "data": [self.openai_model()]}

    def openai_model(self) -> dict[str, Any]:
        """Return the model in OpenAI's form, with the maximum length that vLLM adds."""
        return {
            "id": self.name,
            "object": "model",
            "created": int(self._start.timestamp()),
            "owned_by": "radixkv",
            "max_model_len": self._limits.max_sequence_tokens,
        }

    def anthropic_list(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return a page of the list in Anthropic's form.

        Args:
            query: the query parameters; `after_id` and `before_id` request the page after and before a model.

        Raises:
            InvalidRequest: the parameter `limit` is not a number of models.
        """
        limit = query.get("limit", "20")
        # Five digits suffice to see that a number exceeds the maximum.
        if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:5]) <= _MAX_PAGE_SIZE):
            raise InvalidRequest(f"limit: expected an integer from 1 to {_MAX_PAGE_SIZE}, got another value")
        is_beyond = self.name in (query.get("after_id"), query.get("before_id"))
        data = [] if is_beyond else [self.anthropic_model()]
        first_and_last_id = self.name if data else None
        return {"data": data, "has_more": False, "first_id": first_and_last_id, "last_id": first_and_last_id}

    def anthropic_model(self) -> dict[str, Any]:
        """Return the model in Anthropic's form."""
        return {
            "type": "model",
            "id": self.name,
            "display_name": self.name,
            "created_at": self._start.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": self._limits.max_prompt_tokens,
            "max_tokens": self._limits.max_sequence_tokens - 1,
        }
