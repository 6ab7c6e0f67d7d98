"""Names, links, tests and commands in the documentation exist."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from radixkv.config import (
    CacheConfig,
    EngineConfig,
    EventsConfig,
    GatewayConfig,
    ModelConfig,
    ServerConfig,
    TenantConfig,
)

from .house import ROOT

# Every page except the log, which uses the names of its day.
DOCUMENTS = sorted(
    {
        *(Path(name) for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "proto/STABILITY.md")),
        *(
            path.relative_to(ROOT)
            for folder in ("radixkv", "kernels", "service", "bench", "tests", "docs")
            for path in (ROOT / folder).rglob("*.md")
        ),
    }
    - {Path("docs/LOG.md")}
)
# What the text between backticks may be: a path of the project; a class, a method or a call; a configuration key.
SOURCE = re.compile(r"^(?:radixkv|kernels|service|bench|tests|docs|proto)/[\w./]+$")
NAME = re.compile(r"^([A-Z][a-z]+\w*)(?:\.(\w+))?(?:\(\))?$")
KEY = re.compile(r"^(model|cache|engine|server|events|gateway|default_tenant|tenants\.NAME)\.(\w+)(?: = .+)?$")
# Commands and links, anywhere in a document.
COMMAND = re.compile(r"python -m ((?:bench|tests)(?:\.[a-z_]\w*)+)")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
SECTIONS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "engine": EngineConfig,
    "server": ServerConfig,
    "events": EventsConfig,
    "gateway": GatewayConfig,
    "tenants.NAME": TenantConfig,
    "default_tenant": TenantConfig,
}
WEB_PREFIXES = ("http://", "https://")


def text_of(document: Path) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@cache
def sources() -> str:
    """Return the text of all Python and .proto sources."""
    folders = ("radixkv", "kernels", "service", "bench", "proto")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".proto")]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def is_known(quoted: str) -> bool:
    """Whether a quoted class, method, call or configuration key exists; true for any other text."""
    if key := KEY.match(quoted):
        return key[2] in {field.name for field in dataclasses.fields(SECTIONS[key[1]])}
    if name := NAME.match(quoted):
        is_defined = re.search(rf"^ *(?:class|message|rpc) {name[1]}\b", sources(), flags=re.MULTILINE)
        return is_defined is not None and (name[2] is None or f"def {name[2]}(" in sources())
    return True


def missing(document: Path, text: str) -> list[str]:
    """Return the names, paths, tests, commands and links in a document that do not exist."""
    wrong = [quoted for quoted in re.findall(r"`([^`\n]+)`", text) if not is_known(quoted)]
    for quoted in re.findall(r"`([^`\n]+)`", text):
        path, _, test = quoted.partition("::")
        file = ROOT / path
        is_missing = SOURCE.match(path) is not None and not file.exists()
        if is_missing or (test and f"def {test}(" not in file.read_text(encoding="utf-8")):
            wrong.append(quoted)
    for module in COMMAND.findall(text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            wrong.append(module)
    for link, anchor in LINK.findall(text):
        target = (ROOT / document).parent / link if link else ROOT / document
        if link.startswith(WEB_PREFIXES):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(f"{link}#{anchor}" if anchor else link)
    return wrong


def anchors(text: str) -> list[str]:
    """Return the anchors of all headings, as GitHub generates them."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_names_and_links_in_a_document_exist(document: Path) -> None:
    assert missing(document, text_of(document)) == []


def test_the_readme_lists_all_extras() -> None:
    extras = tomllib.loads(text_of(Path("pyproject.toml")))["project"]["optional-dependencies"]
    named = {name for names in re.findall(r"'\.\[([\w,]+)\]'", text_of(Path("README.md"))) for name in names.split(",")}
    assert named == set(extras) - {"dev"}  # `all` includes `dev`


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("see `radixkv/errors.py` and `radixkv/cache`", []),
        ("see `radixkv/no_such_file.py`", ["radixkv/no_such_file.py"]),
        ("`tests/rules/test_docs.py::test_the_readme_lists_all_extras`", []),
        ("`tests/rules/test_docs.py::test_of_nothing`", ["tests/rules/test_docs.py::test_of_nothing"]),
        ("`PrefixCache`, `Runner.prepare`, `Retain`, `cache.kv_dtype = 4` and `tenants.NAME.weight`", []),
        ("`PrefixCash`, `Runner.repair`, `cache.dtype`", ["PrefixCash", "Runner.repair", "cache.dtype"]),
        ("run `python -m bench.replay --help`", []),
        ("python -m bench.nothing --help", ["bench.nothing"]),
        ("[the log](docs/LOG.md), [a picture](docs/none.png)", ["docs/none.png"]),
        ("[peers](https://example.org/x)", []),
        ("[here](#two-commands), [there](#no-commands)", ["#no-commands"]),
        ("[how](tests/README.md#running-tests), [what](tests/README.md#nothing)", ["tests/README.md#nothing"]),
    ],
)
def test_broken_names_and_links_are_detected(text: str, wrong: list[str]) -> None:
    assert missing(Path("README.md"), text) == wrong
