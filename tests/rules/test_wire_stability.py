"""The promise of proto/STABILITY.md: nothing that clients of version 1 depend on is changed or removed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from .house import ROOT
from .wire_table import FILES, lines_of_file, wire_lines

FROZEN = (Path(__file__).parent / "wire_v1.txt").read_text(encoding="utf-8").splitlines()


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
        if found := re.match(r"field (.+)\.(\w+) = (\d+):", line):
            assert names.setdefault((found[1], found[3]), found[2]) == found[2]


def dependencies_of(file):
    """Return the files that a file needs, each after its own dependencies."""
    found = {}
    for each in file.dependencies:
        found |= {needed.name: needed for needed in (*dependencies_of(each), each)}
    return list(found.values())


def changed(change) -> list[str]:
    """Return the lines of prefill.proto after a change of its descriptor."""
    pool = descriptor_pool.DescriptorPool()
    for file in dependencies_of(FILES[0]):
        copy = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(copy)
        pool.Add(copy)
    copy = descriptor_pb2.FileDescriptorProto()
    FILES[0].CopyToProto(copy)
    change(next(message for message in copy.message_type if message.name == "Usage"))
    pool.Add(copy)
    return list(lines_of_file(pool.FindFileByName(copy.name)))


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
    before = set(lines_of_file(FILES[0]))
    assert len(before - set(changed(change))) == 1


def test_a_field_may_be_added() -> None:
    def add(message) -> None:
        message.field.add(name="more_tokens", number=1000, type=4, label=1)

    before, after = set(lines_of_file(FILES[0])), set(changed(add))
    assert before < after
