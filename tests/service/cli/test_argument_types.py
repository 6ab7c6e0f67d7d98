import argparse

import pytest

from radixkv.service.cli.argument_types import (
    capacities,
    count,
    days,
    grammar,
    json_schema,
    period,
    points,
    positive,
    processors,
    seed,
    share,
    token_ids,
    whole,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("2560000", 2_560_000),
        ("2.56M", 2_560_000),
        ("16k", 16_000),
        ("16K", 16_000),
        ("0.5k", 500),
        ("16Ki", 16_384),
        ("16ki", 16_384),
        ("1.5Ki", 1536),
        ("1Mi", 2**20),
        ("1G", 10**9),
        ("1Gi", 2**30),
    ],
)
def test_a_count_means_the_same_everywhere(text, value):
    assert whole(text) == value
    assert capacities(f"{text}, 7,{text}") == [value, 7]
    assert positive(text) == count(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "Ki", "-1", "+1", "1.0005k", "1.5", ".5k", "1e3", "8kb", "8 k", "inf", "nan", "²"]
)
def test_a_value_that_is_no_count_is_refused(text):
    for parse in (whole, positive, count, capacities):
        with pytest.raises(argparse.ArgumentTypeError, match=r"^expected a whole number from [01]"):
            parse(text)


@pytest.mark.parametrize(("parse", "maximum"), [(count, 2**32 - 1), (positive, 2**31 - 1), (whole, 2**50)])
def test_a_count_has_a_bound(parse, maximum):
    assert parse(str(maximum)) == maximum
    with pytest.raises(argparse.ArgumentTypeError, match=rf" to {maximum}, such as .*, got {maximum + 1}$"):
        parse(str(maximum + 1))
    with pytest.raises(argparse.ArgumentTypeError):
        parse("9" * 5000)


def test_only_some_counts_may_be_zero():
    assert count("0") == 0
    for parse in (positive, whole):
        with pytest.raises(argparse.ArgumentTypeError, match=r"from 1, such as .*, got 0$"):
            parse("0")


def as_in_message(text):
    """Return an argument as the messages of errors show it."""
    return text or "an empty string"


def test_points_are_0_to_100():
    assert [points(text) for text in ("0", "50", "100")] == [0, 50, 100]
    for text in ("101", "-1", "1k", "", "5.0", "²"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"^expected 0 to 100, got {as_in_message(text)}$"):
            points(text)


def test_a_share_is_0_to_1():
    assert [share(text) for text in ("0", "0.25", "1")] == [0, 0.25, 1]
    for text in ("-0.1", "1.1", "nan", "half", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected 0 to 1, got "):
            share(text)


@pytest.mark.parametrize(("parse", "maximum"), [(period, 86_400), (days, 36_500)])
def test_a_time_is_above_0_and_bounded(parse, maximum):
    assert [parse(text) for text in ("0.5", "1e2", str(maximum))] == [0.5, 100, maximum]
    for text in ("0", "-1", f"{maximum}.1", "1e300", "inf", "nan", "soon", ""):
        with pytest.raises(
            argparse.ArgumentTypeError,
            match=rf"^expected more than 0 and .* {maximum}, got {as_in_message(text)}$",
        ):
            parse(text)


def test_processors_may_be_fractions_or_zero():
    assert [processors(text) for text in ("0", "0.5", "8")] == [0, 0.5, 8]
    for text in ("-1", "nan", "inf", "10001", "all", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"^expected 0 to 10000, got {as_in_message(text)}$"):
            processors(text)


def test_a_seed_has_no_unit():
    assert seed(str(2**64 - 1)) == 2**64 - 1
    for text in ("1k", str(2**64), "-1", "", "9" * 5000):
        with pytest.raises(argparse.ArgumentTypeError):
            seed(text)


@pytest.mark.parametrize("text", ["1,2,3", "1, 2 ,3", "1 2 3", " 1\n2\t3\n"])
def test_token_ids_are_separated_by_commas_or_spaces(text):
    assert token_ids(text) == [1, 2, 3]


@pytest.mark.parametrize("text", ["", " ", "1,,2", "1,", "1;2", "1k"])
def test_a_value_that_is_no_token_id_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"^expected integers"):
        token_ids(text)


@pytest.mark.parametrize(
    ("read", "texts"),
    [
        (json_schema, ['{"type": "object"}', ' {"a": ', "true", "{" + "a" * 5000, "{\0}"]),
        (grammar, ['start: "a"', 'root ::= "a"', 'start: "' + "a" * 5000 + '"']),
    ],
)
def test_a_schema_or_a_grammar_is_text_or_a_file(tmp_path, read, texts):
    file = tmp_path / "file"
    file.write_text('{"é": 1}', encoding="utf-8")
    assert read(str(file)) == '{"é": 1}'
    for text in texts:
        assert read(text) == text


@pytest.mark.parametrize("read", [json_schema, grammar])
def test_a_file_that_is_missing_is_not_taken_for_text(tmp_path, read):
    (tmp_path / "latin").write_bytes(b"\xe9")
    for text, words in (
        ("missing.json", r"^expected a file or a .*, got 'missing\.json': no such file$"),
        ("a" * 5000, "no such file$"),
        ("", "got an empty string: no such file$"),
        (str(tmp_path), "^expected a file, got .*: Is a directory$"),
        (str(tmp_path / "latin"), "^expected a file with text in UTF-8, got .*latin: not UTF-8$"),
        ("\udc80", "^expected UTF-8$"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=words):
            read(text)
