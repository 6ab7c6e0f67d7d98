"""Which package may import which. docs/DESIGN.md draws the layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter

import pytest

from .house import ROOT, imported_modules, imported_names, imports, is_generated, modules, reachable

# What each package of radixkv/ may import, besides itself and `COMMON`. Its sub-packages are included.
# A sub-package with a line of its own may import only what that line says.
MAY_IMPORT = {
    "api": "",
    "cache": "api",
    "explain": "api",
    "statements": "api cache",
    "doctor": "api cache explain planning",
    "scheduling": "api cache offload.index",
    "offload.index": "api cache",
    "offload.load_or_compute": "",
    "offload.block_keys": "offload.index",
    "offload.tiers": "kernels offload.block_keys",
    "offload": "api cache scheduling storage kernels",
    "storage": "kernels",
    "model_files": "",
    "model": "model_files storage kernels",
    "compute": "model storage kernels",
    "events": "api cache offload.index",
    "routing": "api events",
    "engine": "api cache doctor scheduling statements offload storage compute events",
    "planning": "api cache events model_files offload routing scheduling storage",
    "telemetry": "api scheduling engine",
    "startup": "api cache doctor storage model compute events engine kernels offload scheduling statements",
    "integrations": "api cache kernels integrations.tiers offload.block_keys offload.index",
    "integrations.tiers": "kernels offload startup",
    "kernels": "",
}
# What every package except kernels may import.
COMMON = (
    "errors",
    "config",
    "namespace",
    "invocation",
    "tokens",
    "blocks",
    "durable_file",
)
WITHOUT_TORCH = (
    "api",
    "cache",
    "explain",
    "statements",
    "doctor",
    "model_files",
    "events",
    "scheduling",
    "routing",
    "planning",
    "offload.index",
    "offload.tiers",
    "offload.block_keys",
    "offload.load_or_compute",
)
# Modules that import packages of extras.
NEED_EXTRAS = ("radixkv.offload.tiers.redis", "radixkv.offload.tiers.mooncake")
KERNELS_MAY_IMPORT = {"torch", "triton", "numpy", "radixkv"} | sys.stdlib_module_names
TORCH = {"torch", "triton", "transformers", "safetensors", "peft"}
WIRE = {"grpc", "grpc_health", "grpc_reflection", "google"}


def table_key(name: str) -> str:
    """Return the key of the table for a module of radixkv/: the sub-package that has a line of its own, or the package.

    >>> table_key("radixkv.offload.index.tier_index"), table_key("radixkv.offload.saver"), table_key("radixkv")
    ('offload.index', 'offload', '')
    """
    names = name.split(".")[1:]
    sub_package = ".".join(names[:2])
    if sub_package in MAY_IMPORT:
        return sub_package
    return names[0] if names else ""


PACKAGES = sorted({table_key(name) for name in modules() if name.count(".") and name.startswith("radixkv.")})


def violations(name: str, imported: set[str]) -> list[str]:
    """Return the forbidden imports of a module.

    Args:
        name: import name of the module.
        imported: all names that it imports.
    """
    if name.partition(".")[0] == "bench":
        return []
    top_level_names = {each.partition(".")[0] for each in imported}
    forbidden = top_level_names & {"tests", "bench", "kernels", "service"}
    own_package = table_key(name)
    if own_package in ("service", "__main__") or is_generated(name):
        return sorted(forbidden)
    forbidden |= top_level_names & WIRE

    if own_package == "kernels":
        forbidden |= top_level_names - KERNELS_MAY_IMPORT
        forbidden |= {each for each in imported if each.startswith("radixkv.") and "kernels" not in each}
        return sorted(forbidden)

    allowed = set(COMMON)
    if own_package and own_package not in COMMON:
        allowed |= {own_package, *MAY_IMPORT.get(own_package, "").split()}
        # A package that is allowed as a whole includes its sub-packages with a line of their own.
        allowed |= {each for each in MAY_IMPORT if each.partition(".")[0] in allowed}
    imported_packages = {table_key(each) for each in imported if each.startswith("radixkv.")}
    return sorted(forbidden | (imported_packages & set(PACKAGES)) - allowed)


def cycle_in(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return the names along a cycle, with the first one repeated at the end, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def test_modules_import_only_what_their_package_may() -> None:
    violations_by_module = {name: violations(name, set(imported_names(name))) for name in modules()}
    assert {name: imported for name, imported in violations_by_module.items() if imported} == {}


def test_modules_have_no_import_cycle() -> None:
    """Imports for type checkers and inside functions count. An `__init__` may import the modules of its package."""
    inits = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert cycle_in({name: imported_modules(name) - inits for name in modules() if name not in inits}) == []


def test_packages_have_no_import_cycle() -> None:
    assert cycle_in({name: set(allowed.split()) for name, allowed in MAY_IMPORT.items()}) == []


def test_a_cycle_is_detected() -> None:
    assert cycle_in({"lease": {"ledger"}, "ledger": {"node", "lease"}}) == ["lease", "ledger", "lease"]


def test_a_package_may_import_only_packages_that_the_design_draws_below_it() -> None:
    document = (ROOT / "docs/DESIGN.md").read_text(encoding="utf-8")
    ((diagram, common),) = re.findall(r"```\n.*no torch.*no trees\n((?:.*\n)*?) *──+\n(.*):.*\n```", document)
    assert {*re.findall(r"\w+", common)} == {*COMMON}
    names_by_row = [re.findall(r"[\w/]+", line) for line in diagram.splitlines()]
    rows = {name.replace("/", "."): row for row, names in enumerate(names_by_row) for name in names}
    # A sub-package that the diagram does not name is drawn as a part of its package.
    drawn = {name: name if name in rows else name.partition(".")[0] for name in MAY_IMPORT}
    assert {*drawn.values()} == {*rows}
    edges = [
        (drawn[importer], drawn[imported]) for importer, allowed in MAY_IMPORT.items() for imported in allowed.split()
    ]
    assert [(above, below) for above, below in edges if above != below and rows[above] >= rows[below]] == []


def test_every_package_is_in_the_table() -> None:
    assert set(PACKAGES) == {*MAY_IMPORT, *COMMON, "service", "__main__", "v1", "gateway"}


def test_only_the_gateway_imports_its_messages() -> None:
    """A process with another copy of these protobuf messages must be able to import everything else.

    The fuzzer may import them, because it runs in a process of its own.
    """
    importers = {name for name in modules() if any(each.startswith("radixkv.gateway") for each in imported_names(name))}
    allowed = ("radixkv.gateway.", "radixkv.service.server.gateway.", "bench.hostile.fuzz.")
    assert importers
    assert {name for name in importers if not name.startswith(allowed)} == set()


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_torch_free_packages_do_not_reach_torch(package: str) -> None:
    names = {name for name in modules() if name.startswith(f"radixkv.{package}")}
    top_level_names = {each.partition(".")[0] for name in reachable(names) for each in imported_names(name)}
    assert top_level_names & (TORCH | WIRE) == set()


def test_torch_free_packages_can_be_imported_without_torch() -> None:
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in sorted(TORCH | WIRE))
    names = [name for name in modules() if re.match(rf"radixkv\.({'|'.join(WITHOUT_TORCH)})\b", name)]
    names = [name for name in names if name not in NEED_EXTRAS]
    assert {"radixkv.cache.prefix_cache", "radixkv.offload.tiers.disk"} <= set(names)
    subprocess.run([sys.executable, "-c", f"import sys; {blocked}; import {', '.join(names)}"], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("radixkv.cache.block_pool", "from radixkv.scheduling.request import Request", ["scheduling"]),
        ("radixkv.cache.block_pool", "from radixkv import engine", ["engine"]),
        ("radixkv.cache.block_pool", "from .. import engine", ["engine"]),
        ("radixkv.cache.block_pool", "def late():\n    import radixkv.engine.core", ["engine"]),
        ("radixkv.cache.block_pool", "if TYPE_CHECKING:\n    from radixkv.engine.core import EngineCore", ["engine"]),
        ("radixkv.cache.block_pool", "import numpy\nfrom radixkv.errors import OutOfBlocks", []),
        ("radixkv.cache.block_pool", "from radixkv.api.retention import Retention", []),
        ("radixkv.cache.block_pool", "from radixkv.kernels.batch import PagedBatch", ["kernels"]),
        ("radixkv.offload.index.tier_index", "from radixkv.offload.saver import Saver", ["offload"]),
        ("radixkv.offload.tiers.disk", "from radixkv.offload.index.tier_index import TierIndex", ["offload.index"]),
        ("radixkv.scheduling.request", "from radixkv.offload.index.prompt_blocks import FetchedBlocks", []),
        ("radixkv.scheduling.request", "from radixkv.offload.tiers.disk import DiskStore", ["offload.tiers"]),
        ("radixkv.engine.core", "from radixkv.offload.index.tier_index import TierIndex", []),
        ("radixkv.compute.runner", "import torch\nfrom radixkv.kernels.batch import PagedBatch", []),
        ("radixkv.compute.runner", "import grpc", ["grpc"]),
        ("radixkv.compute.runner", "from google.protobuf import message", ["google"]),
        ("radixkv.compute.runner", "from radixkv.v1 import cache_pb2", ["v1"]),
        ("radixkv.compute.runner", "import radixkv.service.client", ["service"]),
        ("radixkv.compute.runner", "import kernels", ["kernels"]),
        ("radixkv.tokens", "import radixkv.cache.node", ["cache"]),
        ("radixkv", "import radixkv.engine", ["engine"]),
        ("radixkv.kernels.batch", "import torch, triton, math\nfrom radixkv.kernels import reference", []),
        ("radixkv.kernels.batch", "import transformers", ["transformers"]),
        ("radixkv.kernels.batch", "import radixkv.errors", ["radixkv.errors"]),
        ("radixkv.service.server.server", "import grpc\nimport radixkv.engine", []),
        ("radixkv.service.server.server", "import bench.replay", ["bench"]),
    ],
)
def test_forbidden_imports_are_detected(name: str, source: str, wrong: list[str]) -> None:
    assert violations(name, set(imports(source, name.rpartition(".")[0] or name))) == wrong


def test_no_two_public_classes_have_one_name() -> None:
    paths_by_class: dict[str, set[str]] = {}
    for name, path in modules().items():
        if name.startswith("radixkv.") and not is_generated(name):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    paths_by_class.setdefault(node.name, set()).add(str(path.resolve().relative_to(ROOT)))
    assert {name: sorted(paths) for name, paths in paths_by_class.items() if len(paths) > 1} == {}
