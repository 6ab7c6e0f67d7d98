"""Each package says in a sentence what it is, and names its face: the classes and functions that others begin with."""

from __future__ import annotations

import ast
import re

import pytest

import radixkv.service.client

from .house import is_generated, modules

PACKAGES = [
    name
    for name, path in modules().items()
    if path.name == "__init__.py" and name.count(".") and not name.endswith((".kernels", ".service"))
    if not is_generated(name)
]


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse(modules()[name].read_text(encoding="utf-8"))) or ""


def defined_in(package: str) -> set[str]:
    """Classes and functions at the top of a package's own modules."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for name, path in modules().items()
        if name.rpartition(".")[0] == package
    ]
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for tree in trees for node in tree.body if isinstance(node, kinds)}


def test_the_names_that_clients_import_are_pinned() -> None:
    assert radixkv.service.client.__all__ == [
        "AsyncClient",
        "AsyncTextAnswer",
        "Cancelled",
        "Client",
        "Compression",
        "CompressionPolicy",
        "ConnectError",
        "DataLoss",
        "DeadlineExceeded",
        "FailedPrecondition",
        "FinishReason",
        "InternalError",
        "InvalidArgument",
        "KVSource",
        "MessageTooLarge",
        "MissReason",
        "NotFound",
        "OutOfRange",
        "PermissionDenied",
        "ResourceExhausted",
        "Retention",
        "ServiceError",
        "TextAnswer",
        "TextChunk",
        "Tokenizer",
        "Unauthenticated",
        "Unavailable",
        "Unimplemented",
        "logits_of",
    ]
    assert all(hasattr(radixkv.service.client, name) for name in radixkv.service.client.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_what_it_is(name: str) -> None:
    first = docstring(name).partition("\n")[0]
    assert re.fullmatch(r"[A-Z].{20,}\.", first), first


@pytest.mark.parametrize("name", [name for name in PACKAGES if "Face:" in docstring(name)])
def test_a_face_is_there(name: str) -> None:
    face = re.findall(r"`(\w+)`", docstring(name).partition("Face:")[2])
    assert face
    assert set(face) <= defined_in(name)


def test_every_package_of_the_house_names_its_face() -> None:
    rooms = [name for name in PACKAGES if name.startswith("radixkv.") and not name.startswith("radixkv.service")]
    assert [name for name in rooms if "Face:" not in docstring(name)] == []
