"""The labels of the results of queries, in the part of PromQL that docs/ uses."""

from __future__ import annotations

import re

from tests.rules.test_metric_names import ALL_NAMES, HISTOGRAM

Labels = dict[str, str]  # values by name; an empty value if the query does not fix it

_TOKEN = re.compile(r"[a-zA-Z_:][\w:]*|{[^}]*}|\[\w+\]|\d+(?:\.\d+)?|==|[-+*/<>(),]")
_OPERATORS = ("+", "-", "*", "/", "==", "<", ">", "or")
_LABELS = {
    name + suffix: ("instance", "job", *labels, *["le"] * (suffix == "_bucket"))
    for name, (kind, labels) in {**ALL_NAMES, "up": ("gauge", ())}.items()
    for suffix in (HISTOGRAM if kind == "histogram" else ("",))
}


def labels_of(query: str) -> Labels | None:
    """Return the labels of the results of a query; None if the result is a number.

    Raises:
        AssertionError: a metric or a label does not exist, or an operation never has a result, because its operands
            have different labels.
    """
    tokens = _TOKEN.findall(query)
    assert "".join(tokens) == re.sub(r"\s", "", query), "another part of PromQL"
    labels = _expression(tokens)
    assert not tokens, tokens
    return labels


def _expression(tokens: list[str]) -> Labels | None:
    """Take an expression from the tokens: operands, and operators between them."""
    vectors = []
    while True:
        if (labels := _operand(tokens)) is not None:
            vectors.append(labels)
        if not tokens or tokens[0] not in _OPERATORS:
            break
        del tokens[0]
    assert all(each == vectors[0] for each in vectors), f"different labels: {vectors}"
    return vectors[0] if vectors else None


def _operand(tokens: list[str]) -> Labels | None:
    name = "" if tokens[0] == "(" else tokens.pop(0)
    if name[:1].isdigit():
        return None
    if name in ("", "rate", "increase"):
        return _arguments(tokens)[0]
    if name == "vector":
        _arguments(tokens)
        return {}
    if name == "histogram_quantile":
        labels = _arguments(tokens)[1] or {}
        return {label: labels[label] for label in labels if label != _existing("le", labels)}
    if name in ("sum", "min", "max"):
        kept = _names(tokens) if tokens[0] == "by" else []
        labels = _arguments(tokens)[0] or {}
        return {label: labels[_existing(label, labels)] for label in kept}
    return _selected(name, tokens)


def _selected(name: str, tokens: list[str]) -> Labels:
    """Take the matchers after the name of a metric from the tokens."""
    assert name in _LABELS, f"no metric {name}"
    labels = dict.fromkeys(_LABELS[name], "")
    if tokens and tokens[0].startswith("{"):
        for label, operator, value in re.findall(r'(\w+)(=~?)"(.*?)"', tokens.pop(0)):
            labels[_existing(label, labels)] = value if operator == "=" else ""
    if tokens and tokens[0].startswith("["):
        del tokens[0]
    return labels


def _arguments(tokens: list[str]) -> list[Labels | None]:
    """Take expressions in parentheses from the tokens."""
    found = []
    while tokens[0] != ")":
        assert tokens.pop(0) == ("," if found else "(")
        found.append(_expression(tokens))
    del tokens[0]
    return found


def _names(tokens: list[str]) -> list[str]:
    """Take the names in `by (a, b)` from the tokens."""
    end = tokens.index(")")
    names = [each for each in tokens[2:end] if each != ","]
    del tokens[: end + 1]
    return names


def _existing(label: str, labels: Labels) -> str:
    assert label in labels, f"no label {label} among {list(labels)}"
    return label
