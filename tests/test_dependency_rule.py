"""Who may import whom: kernels <- radixkv <- service <- tests, bench, and never the other way.

Within radixkv/ a module imports only modules above it in ORDER. Imports under `if TYPE_CHECKING:` are for readers and
type checkers, and are free.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ORDER = [
    "errors",
    "config",
    "namespace",
    "miss_reason",
    "block_pool",
    "tenants",
    "token_bytes",
    "child_table",
    "node",
    "radix_tree",
    "retention",
    "lease",
    "eviction",
    "lifetimes",
    "shadow_cache",
    "adaptive_policy",
    "eviction_policies",
    "evictor",
    "cache_audit",
    "leases",
    "prefix_cache",
    "trace",
    "simulate",
    "kv_layout",
    "checkpoint",
    "plan",
    "sampling",
    "result",
    "request",
    "limits",
    "intake",
    "stats",
    "step_budget",
    "departures",
    "held_leases",
    "single_flight",
    "admission",
    "tenant_queue",
    "scheduler",
    "observer",
    "kv_storage",
    "attention",
    "attention_check",
    "attention_choice",
    "triton_kernels",
    "attention_trial",
    "tiny_model",
    "triton_exactness",
    "exactness",
    "fused_modules",
    "model",
    "forward",
    "step_shape",
    "step_buffers",
    "step_graphs",
    "prediction",
    "runner",
    "graph_recorder",
    "graph_check",
    "model_check",
    "pool_size",
    "answers",
    "census",
    "step",
    "lookahead",
    "engine_core",
    "watchdog",
    "engine",
    "engine_builder",
    "metrics",
    "engine_gauges",
    "tracing",
]
FREE_OF_TORCH = ORDER[: ORDER.index("kv_storage")]
TORCH = {"torch", "triton", "transformers", "safetensors", "peft"}
WIRE = {"grpc", "grpc_health", "grpc_reflection", "google"}


def imports(source: str, package: str) -> Iterator[str]:
    """Dotted names that a module imports, at its top or inside functions, absolute; `from a import b` gives a.b too."""
    tree = ast.parse(source)
    type_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in type_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def violations(name: str, imported: set[str]) -> list[str]:
    """What a module, named as it is imported, must not have imported."""
    tops = {each.partition(".")[0] for each in imported}
    ours = {each for each in imported if each.partition(".")[0] == "radixkv"}
    parts = name.split(".")
    if parts[0] in ("tests", "bench"):
        return []
    wrong = sorted(tops & {"tests", "bench", "kernels", "service"})
    if parts[:2] == ["radixkv", "service"]:
        return wrong
    if parts[:2] == ["radixkv", "kernels"]:
        allowed = {"torch", "triton", "numpy", "radixkv"} | sys.stdlib_module_names
        return wrong + sorted(tops - allowed) + sorted(each for each in ours if not is_within(each, "radixkv.kernels"))
    wrong += sorted(each for each in ours if is_within(each, "radixkv.service"))
    if parts[:2] == ["radixkv", "v1"]:
        return wrong
    wrong += sorted(tops & WIRE) + sorted(each for each in ours if is_within(each, "radixkv.v1"))
    if len(parts) == 1:  # radixkv/__init__.py
        return wrong + sorted(ours) + sorted(tops & TORCH)
    if parts[1] not in ORDER:
        return [*wrong, f"{parts[1]} has no place: put it into ORDER"]
    siblings = {
        each.split(".")[1] for each in ours if each.count(".") and (ROOT / f"radixkv/{each.split('.')[1]}.py").exists()
    }
    wrong += sorted(siblings - set(ORDER[: ORDER.index(parts[1])]))
    if parts[1] in FREE_OF_TORCH:
        wrong += sorted(tops & TORCH) + sorted(each for each in ours if is_within(each, "radixkv.kernels"))
    return wrong


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def modules() -> Iterator[tuple[str, Path]]:
    """Every module by the name it is imported under; kernels/ and service/ are mapped into radixkv."""
    for folder, package in (
        ("kernels", "radixkv.kernels"),
        ("radixkv", "radixkv"),
        ("service", "radixkv.service"),
        ("bench", "bench"),
        ("tests", "tests"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(part for part in parts if part != "__init__")]), path


MODULES = list(modules())


@pytest.mark.parametrize(("name", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_a_module_imports_only_what_is_below_it(name: str, path: Path) -> None:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    assert violations(name, set(imports(path.read_text(encoding="utf-8"), package))) == []


@pytest.mark.parametrize(
    ("name", "source", "wrong"),
    [
        ("radixkv.block_pool", "from radixkv.prefix_cache import Match", ["prefix_cache"]),
        ("radixkv.block_pool", "from radixkv import prefix_cache", ["prefix_cache"]),
        ("radixkv.block_pool", "from . import prefix_cache", ["prefix_cache"]),
        ("radixkv.block_pool", "from .prefix_cache import Match", ["prefix_cache"]),
        ("radixkv.block_pool", "def late():\n    import radixkv.prefix_cache", ["prefix_cache"]),
        ("radixkv.block_pool", "import torch.nn", ["torch"]),
        ("radixkv.block_pool", "import numpy\nfrom radixkv.errors import OutOfBlocks", []),
        ("radixkv.block_pool", "if TYPE_CHECKING:\n    from radixkv.prefix_cache import Match", []),
        ("radixkv.block_pool", "if TYPE_CHECKING:\n    import numpy\nelse:\n    import torch", ["torch"]),
        (
            "radixkv.block_pool",
            "from radixkv.kernels.batch import PagedBatch",
            ["radixkv.kernels.batch", "radixkv.kernels.batch.PagedBatch"],
        ),
        ("radixkv.runner", "import torch\nfrom radixkv.kernels.batch import PagedBatch", []),
        ("radixkv.runner", "import grpc", ["grpc"]),
        ("radixkv.runner", "from google.protobuf import message", ["google"]),
        ("radixkv.runner", "from radixkv.v1 import cache_pb2", ["radixkv.v1", "radixkv.v1.cache_pb2"]),
        ("radixkv.runner", "import radixkv.service.client", ["radixkv.service.client"]),
        ("radixkv.novelty", "", ["novelty has no place: put it into ORDER"]),
        ("radixkv.kernels.batch", "import torch, triton, math\nfrom radixkv.kernels import reference", []),
        ("radixkv.kernels.batch", "import transformers", ["transformers"]),
        ("radixkv.kernels.batch", "import radixkv.errors", ["radixkv.errors"]),
        ("radixkv.service.server", "import grpc\nimport radixkv.engine", []),
        ("radixkv.service.server", "import bench.replay", ["bench"]),
        ("radixkv", "import radixkv.engine", ["radixkv.engine"]),
        ("radixkv.engine", "import kernels", ["kernels"]),
        ("tests.test_engine", "import bench.replay, grpc, radixkv.service", []),
    ],
)
def test_the_rule_sees_what_it_forbids(name: str, source: str, wrong: list[str]) -> None:
    assert violations(name, set(imports(source, name.rpartition(".")[0] or name))) == wrong


def test_the_cache_imports_where_there_is_no_torch() -> None:
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in sorted(TORCH | WIRE))
    present = [name for name in FREE_OF_TORCH if (ROOT / f"radixkv/{name}.py").exists()]
    assert "prefix_cache" in present
    program = f"import sys; {blocked}; import {', '.join(f'radixkv.{name}' for name in present)}"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
