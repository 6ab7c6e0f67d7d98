"""The promise of proto/STABILITY.md: nothing that clients of version 1 depend on is changed or removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from radixkv.v1 import prefill_pb2

from .house import ROOT
from .wire_table import FILES, lines_of_file, wire_lines

FROZEN = (Path(__file__).parent / "wire_v1.txt").read_text(encoding="utf-8").splitlines()
PREFILL_FILE = prefill_pb2.DESCRIPTOR


def test_nothing_frozen_was_changed_or_removed() -> None:
    assert sorted(set(FROZEN) - set(wire_lines())) == [], "see proto/STABILITY.md"


def test_the_frozen_table_covers_every_file_of_version_1() -> None:
    files = {path.name for path in (ROOT / "proto" / "radixkv" / "v1").glob("*.proto")}
    assert {Path(file.name).name for file in FILES} == files
    assert len(FROZEN) == len(set(FROZEN))
    kinds = {line.partition(" ")[0] for line in FROZEN}
    assert kinds == {"field", "message", "rpc", "value"}


def test_no_field_number_is_reused() -> None:
    names: dict[tuple[str, str], str] = {}
    for line in [*FROZEN, *wire_lines()]:
        if field := re.match(r"field (.+)\.(\w+) = (\d+):", line):
            message, name, number = field.groups()
            assert names.setdefault((message, number), name) == name


def dependencies_of(file):
    """Return the files that a file imports, directly or indirectly, each after its own dependencies."""
    files_by_name = {}
    for imported in file.dependencies:
        files_by_name |= {each.name: each for each in (*dependencies_of(imported), imported)}
    return list(files_by_name.values())


def lines_after(change) -> list[str]:
    """Return the lines of prefill.proto after `change(message)` was applied to the descriptor of its message Usage."""
    pool = descriptor_pool.DescriptorPool()
    for file in dependencies_of(PREFILL_FILE):
        dependency = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(dependency)
        pool.Add(dependency)
    changed_file = descriptor_pb2.FileDescriptorProto()
    PREFILL_FILE.CopyToProto(changed_file)
    change(next(message for message in changed_file.message_type if message.name == "Usage"))
    pool.Add(changed_file)
    return list(lines_of_file(pool.FindFileByName(changed_file.name)))


def renumber(message) -> None:
    message.field[0].number = 99


def rename(message) -> None:
    message.field[0].name = "other"


def retype(message) -> None:
    message.field[0].type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING


def repeat(message) -> None:
    message.field[0].label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED


def remove(message) -> None:
    del message.field[0]


@pytest.mark.parametrize("change", [renumber, rename, retype, repeat, remove])
def test_a_changed_field_is_detected(change) -> None:
    before = set(lines_of_file(PREFILL_FILE))
    assert len(before - set(lines_after(change))) == 1


def test_a_field_may_be_added() -> None:
    def add(message) -> None:
        field = descriptor_pb2.FieldDescriptorProto
        message.field.add(name="more_tokens", number=1000, type=field.TYPE_UINT64, label=field.LABEL_OPTIONAL)

    before, after = set(lines_of_file(PREFILL_FILE)), set(lines_after(add))
    assert before < after
