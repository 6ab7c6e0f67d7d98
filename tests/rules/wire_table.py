"""The protocol of version 1 as lines: each field, enum value and method, with everything that clients depend on.

`python -m tests.rules.wire_table > tests/rules/wire_v1.txt` freezes additions at a release.
"""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from radixkv.v1 import cache_pb2, events_pb2, explain_pb2, fleet_pb2, hints_pb2, model_pb2, prefill_pb2

FILES = tuple(
    each.DESCRIPTOR for each in (prefill_pb2, explain_pb2, cache_pb2, events_pb2, model_pb2, fleet_pb2, hints_pb2)
)

_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def wire_lines() -> list[str]:
    """Return all lines, sorted."""
    return sorted(line for file in FILES for line in lines_of_file(file))


def lines_of_file(file: FileDescriptor) -> Iterator[str]:
    """Yield the lines of one .proto file."""
    for message in file.message_types_by_name.values():
        yield from _lines_of_message(message)
    for enum in file.enum_types_by_name.values():
        yield from _lines_of_enum(enum)
    for service in file.services_by_name.values():
        for method in service.methods:
            request = f"{'stream ' if method.client_streaming else ''}{method.input_type.full_name}"
            response = f"{'stream ' if method.server_streaming else ''}{method.output_type.full_name}"
            yield f"rpc {method.full_name}: {request} -> {response}"


def _lines_of_message(message: Descriptor) -> Iterator[str]:
    yield f"message {message.full_name}"
    for field in message.fields:
        yield f"field {message.full_name}.{field.name} = {field.number}: {_type_of(field)}"
    for inner in message.nested_types:
        yield from _lines_of_message(inner)
    for enum in message.enum_types:
        yield from _lines_of_enum(enum)


def _lines_of_enum(enum: EnumDescriptor) -> Iterator[str]:
    for value in enum.values:
        yield f"value {enum.full_name}.{value.name} = {value.number}"


def _type_of(field: FieldDescriptor) -> str:
    """Return the type of a field, with its cardinality, oneof and presence."""
    oneof = field.containing_oneof
    if field.is_repeated:
        label = "repeated " if not field.is_packed else "packed "
    elif oneof is not None and not oneof.name.startswith("_"):  # protoc makes a oneof `_name` for each optional field
        label = f"oneof {oneof.name} "
    elif field.message_type is None and field.has_presence:
        label = "optional "
    else:
        label = ""
    named_type = field.message_type or field.enum_type
    return label + (_TYPES[field.type] if named_type is None else named_type.full_name)


if __name__ == "__main__":
    print("\n".join(wire_lines()))
