"""The docstring of each package describes it in a sentence, and lists its public API."""

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


def public_api(package: str) -> set[str] | None:
    """Return the names that the docstring of a package lists as its public API; None if there is no list."""
    section = re.search(r"^Public API:(.*)", docstring(package), re.MULTILINE | re.DOTALL)
    return None if section is None else set(re.findall(r"`(\w+)`", section[1]))


def defined_in(package: str) -> set[str]:
    """Return the top-level classes and functions in the modules of a package."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for name, path in modules().items()
        if name.rpartition(".")[0] == package
    ]
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for tree in trees for node in tree.body if isinstance(node, definitions)}


def test_the_exported_names_of_the_client_are_stable() -> None:
    assert radixkv.service.client.__all__ == [
        "AsyncClient",
        "AsyncTextAnswer",
        "Awaits",
        "Cancelled",
        "Client",
        "Compression",
        "CompressionPolicy",
        "ConnectError",
        "DataLoss",
        "DeadlineExceeded",
        "DifferenceKind",
        "FailedPrecondition",
        "FinishReason",
        "HintStatus",
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
def test_a_package_has_a_description(name: str) -> None:
    first_line = docstring(name).partition("\n")[0]
    assert re.fullmatch(r"[A-Z].{20,}\.", first_line), first_line


@pytest.mark.parametrize("name", [name for name in PACKAGES if public_api(name) is not None])
def test_the_public_api_of_a_package_exists(name: str) -> None:
    names = public_api(name)
    assert names
    assert names <= defined_in(name)


def test_every_package_lists_its_public_api() -> None:
    packages = [name for name in PACKAGES if name.startswith("radixkv.") and not name.startswith("radixkv.service")]
    assert [name for name in packages if public_api(name) is None] == []
