"""Names of fields: in messages of the engine, and in the APIs that have another name for them."""

from __future__ import annotations

from collections.abc import Mapping


def prompt_field_names(prompt: str, max_tokens: str) -> dict[str, str]:
    """Return the names of the fields that every API has, by their names in messages of the engine.

    Args:
        prompt: the API's name of the prompt.
        max_tokens: the API's name of the maximum number of tokens of a completion.
    """
    return {"prefill.token_ids": prompt, "token_ids": prompt, "max_new_tokens": max_tokens}


def renamed_fields(fields: str, names: Mapping[str, str]) -> str:
    """Return the fields at the beginning of a message as an API calls them.

    >>> renamed_fields("prefill.token_ids[3], seed", prompt_field_names("prompt", "max_tokens"))
    'prompt[3], seed'

    Args:
        fields: names, separated by a comma and a space; each may have an index.
        names: the names in the API, by their names in messages of the engine. Other names stay.
    """
    return ", ".join(_renamed(each, names) for each in fields.split(", "))


def _renamed(field: str, names: Mapping[str, str]) -> str:
    name, bracket, index = field.partition("[")
    return names.get(name, name) + bracket + index
