"""Finds the keyword argument with which a transformers model takes a cache, which depends on the version.

`cache_name` in radixkv does the same. Workers of other engines do not import radixkv, because their start is timed.
"""

from __future__ import annotations

import inspect
from typing import Any


def cache_keyword(model: Any) -> str:
    """Return `cache`, as since transformers 5.24, or `past_key_values`, as before.

    Args:
        model: a model of transformers.
    """
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
