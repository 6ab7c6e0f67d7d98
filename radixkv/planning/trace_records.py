"""The records of a file: its JSON values or msgpack messages, one after the other, each with its place in the file.

A file contains JSON lines, one or several whole JSON documents, or concatenated msgpack messages, and may be compressed
with gzip. The format is detected by the first bytes, not by the name. For a directory, its `*.json`, `*.jsonl` and
`*.msgpack` files, also with `.gz`, are read in the order of their names.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from radixkv.config.needed_package import require_package
from radixkv.errors import ConfigError

MAX_VALUE_BYTES = 2**30  # maximum size of a line, and of a JSON document with several lines

_GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1; no JSON begins with it
_BOM = b"\xef\xbb\xbf"
_SUFFIXES = (".json", ".jsonl", ".msgpack")
# Formats that are refused: their first bytes, and what an error message says about them.
_FOREIGN_FORMATS = {
    b"\x28\xb5\x2f\xfd": "zstd data; unpack it with `unzstd`",
    b"\xfd7zXZ": "xz data; unpack it with `unxz`",
    b"BZh": "bzip2 data; unpack it with `bunzip2`",
    b"PK\x03\x04": "a zip archive; unpack it with `unzip`",
    b"PAR1": "a Parquet file; write it as JSON lines, as pandas does with `to_json(..., orient='records', lines=True)`",
}
_MAX_SHOWN_CHARACTERS = 60


class Record(NamedTuple):
    """One value of a file.

    Attributes:
        where: place of the value, such as `trace.jsonl:3`.
        value: the decoded JSON or msgpack value: dict, list, str, bytes, int, float, bool or None.
    """

    where: str
    value: Any


def read_records(path: Path) -> Iterator[Record]:
    """Yield the values of a file or of the files in a directory, without blank lines.

    If the first value of a file, or any JSON document with several lines, is a list of objects, the objects are yielded
    one by one.

    Raises:
        ConfigError: a file can't be read, unpacked or decoded, or a value is longer than `MAX_VALUE_BYTES`. The message
            names the line.
    """
    num_records = 0
    try:
        for file in _files(path):
            with file.open("rb") as stream:
                for record in _stream_records(_decompress(stream), str(file)):
                    yield record
                    num_records += 1
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"trace {path}: expected whole gzip data, got damage after {num_records} requests ({error})"
        ) from error
    except OSError as error:
        raise ConfigError(f"trace {path}: expected a readable file, got: {error.strerror}") from error


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.name.removesuffix(".gz").endswith(_SUFFIXES))
    return files or [path]  # which open() refuses as a directory


def _decompress(stream: BinaryIO) -> io.BufferedReader:
    reader = cast(io.BufferedReader, stream)  # a pipe can be peeked at, but not read again
    if reader.peek(2)[:2] != _GZIP_MAGIC:
        return reader
    return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=reader)))


def _stream_records(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    start = stream.peek(8)[:8]
    for magic, explanation in _FOREIGN_FORMATS.items():
        if start.startswith(magic):
            raise ConfigError(f"{name}:1: expected a JSON object, got bytes that are not UTF-8 text: {explanation}")
    if start and _begins_msgpack(start[0]):
        return _msgpack_records(stream, name)
    return _json_records(stream, name)


def _begins_msgpack(first_byte: int) -> bool:
    """Whether a byte begins an array or a map of msgpack. No JSON value in UTF-8 begins with such a byte."""
    return 0x80 <= first_byte <= 0x9F or 0xDC <= first_byte <= 0xDF


def _msgpack_records(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    require_package(f"trace {name}", "msgpack", "msgpack", "events")
    import msgpack

    unpacker = msgpack.Unpacker(stream, max_buffer_size=MAX_VALUE_BYTES, strict_map_key=False)
    number = end = 0  # of the last complete message
    try:
        for number, value in enumerate(unpacker, start=1):
            yield Record(f"{name}: message {number}", value)
            end = unpacker.tell()
    except (TypeError, ValueError, msgpack.UnpackException) as error:  # TypeError: a list as the key of a map
        raise ConfigError(
            f"{name}: message {number + 1}: expected msgpack, got damaged bytes ({type(error).__name__})"
        ) from error
    if end != stream.tell():
        raise ConfigError(f"{name}: message {number + 1}: expected a whole msgpack message, got the end of the file")


def _json_records(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    is_first = True
    for line_number, line in enumerate(_lines(stream, name), start=1):
        if line_number == 1:
            line = line.removeprefix(_BOM)
        if not line or line.isspace():
            continue
        where = f"{name}:{line_number}"
        if not is_first:
            yield Record(where, _parse(line, where, json.loads))
            continue
        is_first = False
        try:
            value = _parse(line, where, json.loads)
        except ConfigError as error:
            _refuse_table(line, where)
            if not line.lstrip().startswith((b"{", b"[")):
                raise
            yield from _document_records(line + _read_rest(stream, name), where, error)
            return
        yield from _records_of(where, value)


def _lines(stream: io.BufferedReader, name: str) -> Iterator[bytes]:
    number = 1
    while line := stream.readline(MAX_VALUE_BYTES + 1):
        if len(line) > MAX_VALUE_BYTES:
            raise ConfigError(f"{name}:{number}: expected lines of at most {MAX_VALUE_BYTES:,} bytes, got a longer one")
        yield line
        number += 1


def _read_rest(stream: io.BufferedReader, name: str) -> bytes:
    data = stream.read(MAX_VALUE_BYTES + 1)
    if len(data) > MAX_VALUE_BYTES:
        raise ConfigError(f"{name}: expected a JSON document of at most {MAX_VALUE_BYTES:,} bytes, got a longer one")
    return data


def _document_records(data: bytes, where: str, refused_line: ConfigError) -> Iterator[Record]:
    """Yield JSON values that span several lines.

    Raises:
        ConfigError: `refused_line` if not even the first value is complete, since the file then consists of JSON lines.
    """
    decode = json.JSONDecoder().raw_decode
    name, _, first_line = where.rpartition(":")
    text = _parse(data, where, str)
    position = 0
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        line_number = int(first_line) + text.count("\n", 0, position)
        value_where = f"{name}:{line_number}"
        try:
            value, end = decode(text, position)
        except (ValueError, RecursionError) as error:
            if position == 0:
                raise refused_line from None
            message = f"{value_where}: expected a JSON object, got text that is not JSON ({error})"
            raise ConfigError(message) from error
        yield from _records_of(value_where, value)
        position = end


def _records_of(where: str, value: Any) -> Iterable[Record]:
    """Return one record per object if the value is a list of objects, otherwise one record."""
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        return [Record(f"{where}: item {number}", each) for number, each in enumerate(value)]
    return [Record(where, value)]


def _parse(data: bytes, where: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: expected a JSON object, got bytes that are not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected a JSON object, got text that is not JSON ({error})") from error


def _refuse_table(line: bytes, where: str) -> None:
    """Refuse a CSV file by its first line. Public traces in this format contain only lengths."""
    text = line.decode(errors="replace").strip()  # "\ufffd" stands for bytes that are not UTF-8
    columns = next((text.split(each) for each in ",;\t" if each in text), [])
    if len(columns) < 2 or text[0] in '{["' or not text.replace("\t", " ").isprintable() or "\ufffd" in text:
        return
    names = ", ".join(each.strip() for each in columns)
    if len(names) > _MAX_SHOWN_CHARACTERS:
        names = names[: _MAX_SHOWN_CHARACTERS - 3] + "..."
    raise ConfigError(
        f"{where}: expected JSON, got a table with the columns {names}. A table of lengths does not say which prompts "
        "share a prefix. Take a trace with hash_ids, or log the prompts and convert the log with `radixkv trace`; "
        "`radixkv plan` answers questions about lengths"
    )
