"""The plan of the house: which package may import which. docs/DESIGN.md draws it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter

import pytest

from .house import ROOT, imported_modules, imported_names, imports, is_generated, modules, reachable

# What each package of radixkv/ may import, besides itself and the words.
MAY_IMPORT = {
    "api": "",
    "cache": "api",
    "scheduling": "api cache",
    "storage": "kernels",
    "model": "storage kernels",
    "compute": "model storage kernels",
    "events": "api cache",
    "routing": "api events",
    "engine": "api cache scheduling storage compute events",
    "planning": "api cache events routing storage",
    "telemetry": "api scheduling engine",
    "startup": "api cache storage model compute events engine kernels scheduling",
    "kernels": "",
}
WORDS = ("errors", "config", "namespace", "invocation", "tokens", "blocks")  # what everybody but kernels may import
WITHOUT_TORCH = ("api", "cache", "events", "scheduling", "routing", "planning")
FREE_FOR_KERNELS = {"torch", "triton", "numpy", "radixkv"} | sys.stdlib_module_names
TORCH = {"torch", "triton", "transformers", "safetensors", "peft"}
WIRE = {"grpc", "grpc_health", "grpc_reflection", "google"}
ROOMS = sorted({name.split(".")[1] for name in modules() if name.count(".") and name.startswith("radixkv.")})


def violations(name: str, imported: set[str]) -> list[str]:
    """Return the imports that a module, named as it is imported, must not have."""
    tops = {each.partition(".")[0] for each in imported}
    rooms = {each.split(".")[1] for each in imported if each.startswith("radixkv.")}
    if name.partition(".")[0] == "bench":
        return []
    wrong = tops & {"tests", "bench", "kernels", "service"}
    room = name.split(".")[1] if "." in name else ""
    if room in ("service", "__main__") or is_generated(name):
        return sorted(wrong)
    wrong |= tops & WIRE
    if room == "kernels":
        wrong |= tops - FREE_FOR_KERNELS
        return sorted(wrong | {each for each in imported if each.startswith("radixkv.") and "kernels" not in each})
    allowed = set(WORDS) if not room or room in WORDS else {room, *MAY_IMPORT.get(room, "").split(), *WORDS}
    return sorted(wrong | (rooms & set(ROOMS)) - allowed)


def circle_in(graph: Mapping[str, Set[str]]) -> list[str]:
    """The names along a circle, the first one again at the end; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def test_a_module_imports_only_what_its_package_may() -> None:
    wrong = {name: violations(name, set(imported_names(name))) for name in modules()}
    assert {name: imported for name, imported in wrong.items() if imported} == {}


def test_no_circle_of_modules() -> None:
    """Imports for type checkers and inside functions are counted. A package's face may name what is in it."""
    faces = {name for name, path in modules().items() if path.name == "__init__.py"}
    assert circle_in({name: imported_modules(name) - faces for name in modules() if name not in faces}) == []


def test_no_circle_of_packages() -> None:
    assert circle_in({room: set(allowed.split()) for room, allowed in MAY_IMPORT.items()}) == []


def test_a_circle_is_seen() -> None:
    assert circle_in({"lease": {"ledger"}, "ledger": {"node", "lease"}}) == ["lease", "ledger", "lease"]


def test_every_room_is_in_the_table() -> None:
    assert set(ROOMS) == {*MAY_IMPORT, *WORDS, "service", "__main__", "v1", "gateway"}


def test_only_the_gateway_knows_its_messages() -> None:
    """A process that uses another copy of these messages must be able to import everything else."""
    users = {name for name in modules() if any(each.startswith("radixkv.gateway") for each in imported_names(name))}
    assert users
    assert {
        name for name in users if not name.startswith(("radixkv.gateway.", "radixkv.service.server.gateway."))
    } == set()


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_the_books_reach_no_torch(room: str) -> None:
    names = {name for name in modules() if name.startswith(f"radixkv.{room}")}
    tops = {each.partition(".")[0] for name in reachable(names) for each in imported_names(name)}
    assert tops & (TORCH | WIRE) == set()


def test_the_books_can_be_imported_where_there_is_no_torch() -> None:
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in sorted(TORCH | WIRE))
    books = [name for name in modules() if re.match(rf"radixkv\.({'|'.join(WITHOUT_TORCH)})\b", name)]
    assert "radixkv.cache.prefix_cache" in books
    subprocess.run([sys.executable, "-c", f"import sys; {blocked}; import {', '.join(books)}"], cwd=ROOT, check=True)


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
def test_the_rule_sees_what_it_forbids(name: str, source: str, wrong: list[str]) -> None:
    assert violations(name, set(imports(source, name.rpartition(".")[0] or name))) == wrong
