"""Plain-text documents in requests, in the form that chat templates expect."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.service.http.json_fields import Fields


def read_file(file: Fields) -> dict[str, Any]:
    """Read the file of a content part in OpenAI's API, which must be text in a data URL.

    Returns:
        A document for the chat template: `title` and `text`.

    Raises:
        InvalidRequest: the message names the field.
    """
    file.require_neutral("this server stores no files; send file_data", file_id=())
    file.require_neutral("this server loads no files; send file_data", file_url=())
    title = file.text("filename", "") or ""
    place = file.path_of("file_data")
    media_type, comma, encoded = (file.text("file_data") or "").partition(",")
    if not (comma and media_type.startswith("data:text/") and media_type.endswith(";base64")):
        raise InvalidRequest(
            f"{place}: expected text as data:text/plain;base64,..., since models are served for text only, got "
            "another value"
        )
    try:
        return {"title": title, "text": base64.b64decode(encoded, validate=True).decode()}
    except (binascii.Error, UnicodeDecodeError):  # the message would contain a part of the file
        raise InvalidRequest(f"{place}: expected text in UTF-8, encoded as base64, got something else") from None


def read_document(block: Fields) -> dict[str, Any]:
    """Read a block of the type document in Anthropic's API, whose source must be plain text.

    Returns:
        A document for the chat template: `title` and `text`.

    Raises:
        InvalidRequest: the message names the field.
    """
    source = block.inner("source")
    if source is None or source.text("type") != "text":
        raise InvalidRequest(
            f"{block.path_of('source')}.type: expected text, since models are served for text only, got another type; "
            "extract the text of the document"
        )
    source.require_neutral("extract the text of the document", media_type="text/plain")
    text = source.text("data")
    if not text:
        raise InvalidRequest(f"{source.path_of('data')}: expected text, got nothing")
    source.require_no_others()
    block.require_neutral("put it into the text of the document", context=())
    citations = block.inner("citations")
    if citations is not None:
        citations.require_neutral("this server cites no documents", enabled=False)
        citations.require_no_others()
    return {"title": block.text("title", "") or "", "text": text}
