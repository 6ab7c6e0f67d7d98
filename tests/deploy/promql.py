"""The labels of the results of queries, in the part of PromQL that docs/ uses."""

from __future__ import annotations

import re

from tests.rules.test_metric_names import ALL_NAMES, HISTOGRAM

Labels = dict[str, str]  # values by name; the value is empty where the query selects no single one

_TOKEN = re.compile(r"[a-zA-Z_:][\w:]*|{[^}]*}|\[\w+\]|\d+(?:\.\d+)?|==|[-+*/<>(),]")
_OPERATORS = ("+", "-", "*", "/", "==", "<", ">", "or")


def _labels_of_series() -> dict[str, tuple[str, ...]]:
    """Return the names of the labels of each time series, by the name of the series."""
    labels_of_target = ("instance", "job")  # Prometheus adds these to every series of a server
    labels_by_series: dict[str, tuple[str, ...]] = {"up": labels_of_target}
    for name, (kind, labels) in ALL_NAMES.items():
        for suffix in HISTOGRAM if kind == "histogram" else ("",):
            bucket_label = ("le",) if suffix == "_bucket" else ()
            labels_by_series[name + suffix] = (*labels_of_target, *labels, *bucket_label)
    return labels_by_series


_LABELS = _labels_of_series()


def labels_of(query: str) -> Labels | None:
    """Return the labels of the results of a query; None if the result is a number.

    Raises:
        AssertionError: a metric or a label does not exist, or an operation never has a result, because its operands
            have different labels.
    """
    tokens = _TOKEN.findall(query)
    assert "".join(tokens) == re.sub(r"\s", "", query), f"unsupported PromQL in {query}"
    labels = _take_expression(tokens)
    assert not tokens, tokens
    return labels


def _take_expression(tokens: list[str]) -> Labels | None:
    """Take an expression, operands with operators between them, from the tokens; return the labels of its results."""
    vectors = []
    while True:
        labels = _take_operand(tokens)
        if labels is not None:
            vectors.append(labels)
        if not tokens or tokens[0] not in _OPERATORS:
            break
        del tokens[0]
    assert all(each == vectors[0] for each in vectors), f"different labels: {vectors}"
    return vectors[0] if vectors else None


def _take_operand(tokens: list[str]) -> Labels | None:
    """Take a number, a metric, a function call or an expression in parentheses from the tokens; return its labels."""
    name = "" if tokens[0] == "(" else tokens.pop(0)
    if name[:1].isdigit():
        return None
    if name in ("", "rate", "increase"):
        return _take_arguments(tokens)[0]
    if name == "vector":
        _take_arguments(tokens)
        return {}
    if name == "histogram_quantile":
        labels = _take_arguments(tokens)[1] or {}
        _check_label("le", labels)
        return {label: value for label, value in labels.items() if label != "le"}
    if name in ("sum", "min", "max"):
        grouping_labels = _take_grouping_labels(tokens) if tokens[0] == "by" else []
        labels = _take_arguments(tokens)[0] or {}
        for label in grouping_labels:
            _check_label(label, labels)
        return {label: labels[label] for label in grouping_labels}
    return _take_matchers(name, tokens)


def _take_matchers(name: str, tokens: list[str]) -> Labels:
    """Take the matchers and the range after the name of a metric from the tokens; return the labels of the series."""
    assert name in _LABELS, f"no metric {name}"
    labels = dict.fromkeys(_LABELS[name], "")
    if tokens and tokens[0].startswith("{"):
        for label, operator, value in re.findall(r'(\w+)(=~?)"(.*?)"', tokens.pop(0)):
            _check_label(label, labels)
            labels[label] = value if operator == "=" else ""
    if tokens and tokens[0].startswith("["):
        del tokens[0]
    return labels


def _take_arguments(tokens: list[str]) -> list[Labels | None]:
    """Take expressions in parentheses from the tokens; return the labels of each."""
    arguments = []
    while tokens[0] != ")":
        assert tokens.pop(0) == ("," if arguments else "(")
        arguments.append(_take_expression(tokens))
    del tokens[0]
    return arguments


def _take_grouping_labels(tokens: list[str]) -> list[str]:
    """Take the names in `by (a, b)` from the tokens."""
    end = tokens.index(")")
    names = [each for each in tokens[2:end] if each != ","]
    del tokens[: end + 1]
    return names


def _check_label(label: str, labels: Labels) -> None:
    assert label in labels, f"no label {label} among {list(labels)}"
