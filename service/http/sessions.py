"""Sessions and hints in HTTP requests: which session a request belongs to, and what it says about future use."""

from __future__ import annotations

import json
from collections.abc import Mapping

from google.protobuf.json_format import ParseDict, ParseError

from radixkv.errors import InvalidRequest
from radixkv.service.http.json_fields import Fields
from radixkv.v1.prefill_pb2 import PrefillRequest

# Headers in which clients name a session: any client, Claude Code, and Codex.
SESSION_HEADERS = ("x-session-id", "x-claude-code-session-id", "session_id")
# Precedes the name of the session in the `metadata.user_id` of Claude Code.
_SESSION_MARK = "_session_"


def read_session(fields: Fields, prefill: PrefillRequest) -> None:
    """Read `session_id`, `kv_hints` and `explain`, which this server adds to the APIs.

    Raises:
        InvalidRequest: the message names the field.
    """
    prefill.session_id = fields.text("session_id", "") or ""
    prefill.explain = fields.flag("explain")
    hints = fields.any("kv_hints")
    if hints is None:
        return
    try:
        if not isinstance(hints, Mapping):
            raise TypeError("it is not an object")
        ParseDict(dict(hints), prefill.kv_hints)
    except (ParseError, TypeError, ValueError) as error:
        raise InvalidRequest("kv_hints: expected the fields of a KvHintsEnvelope, got other ones") from error


def session_of_user(metadata: object) -> str:
    """Return the session that Claude Code names in Anthropic's `metadata.user_id`; empty if there is none.

    >>> session_of_user({"user_id": "user_1f_account_2e_session_3d"})
    '3d'
    >>> session_of_user({"user_id": '{"session_id": "3d"}'}), session_of_user({"user_id": "user_1f"})
    ('3d', '')
    """
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    if not isinstance(user, str):
        return ""
    if _SESSION_MARK in user:
        return user.rpartition(_SESSION_MARK)[2]
    try:
        fields = json.loads(user)
    except (ValueError, RecursionError):
        return ""
    session = fields.get("session_id") if isinstance(fields, dict) else None
    return session if isinstance(session, str) else ""
