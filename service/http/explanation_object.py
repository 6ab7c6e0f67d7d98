"""The explanation of a prompt as a JSON object, for the usage of an HTTP response."""

from __future__ import annotations

from typing import Any

from radixkv.v1.explain_pb2 import Difference, DifferenceKind, Excerpt, ExplainResponse, MissReason


def explanation_object(explanation: ExplainResponse) -> dict[str, Any]:
    """Return an explanation with the field names of `ExplainResponse`.

    The fields `segment`, `different_tokens` and those with token ids are left out.
    """
    difference = explanation.difference if explanation.HasField("difference") else None
    return {
        "prompt_tokens": explanation.prompt_tokens,
        "cached_tokens": explanation.cached_tokens,
        "miss_reason": MissReason.Name(explanation.miss_reason).lower(),
        "left_at_token": explanation.left_at_token,
        "computed_tokens": explanation.computed_tokens,
        "computed_s": explanation.computed_s if explanation.HasField("computed_s") else None,
        "difference": None if difference is None else _difference_object(difference),
    }


def _difference_object(difference: Difference) -> dict[str, Any]:
    optional = {
        name: getattr(difference, name) if difference.HasField(name) else None
        for name in ("prompt_span_tokens", "branch_span_tokens", "lost_s")
    }
    return {
        "kind": DifferenceKind.Name(difference.kind).lower(),
        "before_text": difference.before_text,
        "prompt": _excerpt_object(difference.prompt),
        "branch": _excerpt_object(difference.branch) if difference.HasField("branch") else None,
        "lost_tokens": difference.lost_tokens,
        "idle_s": difference.idle_s,
        **optional,
    }


def _excerpt_object(excerpt: Excerpt) -> dict[str, Any]:
    return {"different_text": excerpt.different_text, "equal_text": excerpt.equal_text}
