"""Compressed files are read, and unreadable ones are refused with the place and the remedy."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import msgpack
import pytest

from radixkv.errors import ConfigError
from radixkv.planning.trace_records import read_records


def records_of(file: Path) -> list[tuple[str, object]]:
    """Return the values of a file or directory, each with its place after the path."""
    return [(record.where.removeprefix(str(file)), record.value) for record in read_records(file)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_json_lines_have_line_numbers(tmp_path: Path, pack) -> None:
    file = tmp_path / "trace"
    file.write_bytes(pack(b'\xef\xbb\xbf\r\n{"a": 1}\r\n\r\n  \n[2]\n"x"'))
    assert records_of(file) == [(":2", {"a": 1}), (":5", [2]), (":6", "x")]


def test_a_document_is_split_into_its_items(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    items = [{"a": 1}, {"b": [2]}]
    for text in (json.dumps(items), json.dumps(items, indent=2)):
        file.write_text(text)
        assert records_of(file) == [(":1: item 0", {"a": 1}), (":1: item 1", {"b": [2]})]
    file.write_text(json.dumps({"a": 1}, indent=2) + "\n\n" + json.dumps({"b": 2}, indent=2) + "\n")
    assert records_of(file) == [(":1", {"a": 1}), (":5", {"b": 2})]


def test_damage_in_a_document_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text('{\n"a": 1}\n{\n"b": }')
    with pytest.raises(ConfigError, match=r":3: expected a JSON object, got text that is not JSON \(Expecting value"):
        records_of(file)
    file.write_text('{"a": 1\n{"a": 2}\n')
    with pytest.raises(ConfigError, match=r":1: expected a JSON object, got text that is not JSON"):
        records_of(file)


def test_msgpack_messages_are_numbered(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    values = [[1.5, [["BlockStored", [b"\x00\xff"], None]], 0], {"ts": 2.0, "events": []}]
    data = b"".join(map(msgpack.packb, values))
    for pack in (bytes, gzip.compress):
        file.write_bytes(pack(data))
        assert records_of(file) == [(": message 1", values[0]), (": message 2", values[1])]
    file.write_bytes(data[:-1])
    with pytest.raises(ConfigError, match=r": message 2: expected a whole msgpack message, got the end of the file"):
        records_of(file)
    file.write_bytes(data + b"\xc1")
    with pytest.raises(ConfigError, match=r": message 3: expected msgpack, got damaged bytes"):
        records_of(file)


def test_msgpack_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace"
    file.write_bytes(msgpack.packb([1.0, []]))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "msgpack" else find_spec(name))
    with pytest.raises(ConfigError, match=r"the package msgpack is missing; .*\[events\]"):
        records_of(file)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"\x28\xb5\x2f\xfd rest",
            ":1: expected a JSON object, got bytes that are not UTF-8 text: zstd data; unpack it",
        ),
        (b"PAR1 rest", "a Parquet file; write it as JSON lines"),
        (b"PK\x03\x04 rest", "a zip archive; unpack it with `unzip`"),
        (b"\xff\x01,a,b\n", ":1: expected a JSON object, got bytes that are not UTF-8 text"),
        (b"\x07\x01,a,b\n", ":1: expected a JSON object, got text that is not JSON"),
        (b"\xff\xfe{\x00}\x00", ":1: expected a JSON object, got bytes that are not UTF-8 text"),
        (
            b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
            "got a table with the columns TIMESTAMP, ContextTokens, GeneratedTokens. A table of lengths does not say",
        ),
        (
            b"Timestamp;Model;Request tokens;Response tokens;Total tokens;Log Type\n",
            "convert the log with `radixkv trace`",
        ),
        (b"2023-11-16 18:15:46.6805900\t374\t44\n", "`radixkv plan` answers questions about lengths"),
        (b"not JSON", ":1: expected a JSON object, got text that is not JSON"),
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_other_files_are_refused_with_the_next_step(tmp_path: Path, data: bytes, message: str, pack) -> None:
    file = tmp_path / "trace"
    file.write_bytes(pack(data))
    with pytest.raises(ConfigError) as refused:
        records_of(file)
    assert message in str(refused.value)


def test_lines_and_documents_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.planning.trace_records.MAX_VALUE_BYTES", 100)
    file = tmp_path / "trace"
    file.write_bytes(b"1\n" + b" " * 99 + b"2\n")
    with pytest.raises(ConfigError, match=r":2: expected lines of at most 100 bytes, got a longer one"):
        records_of(file)
    file.write_bytes(gzip.compress(b"[\n" + b"0," * 100 + b"0]"))
    with pytest.raises(ConfigError, match=r": expected a JSON document of at most 100 bytes, got a longer one"):
        records_of(file)


def test_a_directory_has_the_records_of_its_trace_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"b": 1}\n')
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'{\n"a": 1\n}'))
    (tmp_path / "c.txt").write_text("no")
    assert records_of(tmp_path) == [("/a.json.gz:1", {"a": 1}), ("/b.jsonl:1", {"b": 1})]
