"""Reads pages over HTTP, including the pages of errors."""

from __future__ import annotations

import urllib.error
import urllib.request
from email.message import Message

from tests.patience import PATIENCE_S


def get(address: str, path: str, method: str = "GET") -> tuple[int, str, Message]:
    """Return the status, body and headers of a response."""
    request = urllib.request.Request(f"http://{address}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers
