"""docs/MODELS.md agrees with trials of small checkpoints. Slow tests try the whole table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from radixkv.config import ModelConfig
from radixkv.model.attention.native_kernels import NativeKernels
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.on_cpu import native_library
from radixkv.startup.model_check import check_model
from tests.model.coverage.agreement import BLOCK_SIZE
from tests.model.coverage.coverage import cover, engines_of
from tests.model.coverage.small_configs import covered_types, small_config
from tests.model.coverage.table import FILE, line_of, version
from tests.model.exact.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[3]
PAGE = FILE.read_text(encoding="utf-8")
LINES = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` \|.*$", PAGE, re.MULTILINE)}

# One model type for each feature, in this order: softcap, learned positions, experts called by functions of torch,
# heads that are rotated in part, layers that pass no keywords on, routers whose weight is read, layers that share K/V,
# layers without positions, latents rotated as complex numbers, two latent attentions per layer, recurrent states, K/V
# of two shapes, values narrower than keys.
SERVED = [
    *("gemma2", "gpt2", "dbrx", "glm4_moe", "nemotron", "hunyuan_v1_moe", "gemma3n_text", "cohere2"),
    *("deepseek_v2", "longcat_flash", "lfm2", "gemma4_text", "mimo_v2_flash"),
]
REFUSED = ["bloom", "deepseek_v32", "hrm_text", "llama4_text", "mamba2"]

# Types whose cosines and sines are float32 in any dtype, among them one that rotates pairs; and llama, whose cosines
# and sines have the model's dtype.
HALF_PRECISION_TYPES = ["olmo", "olmo2", "olmo3", "flex_olmo", "ernie4_5", "llama"]

needs_the_version_of_the_page = pytest.mark.skipif(
    f"transformers {version()} " not in PAGE, reason=f"docs/MODELS.md was not generated with transformers {version()}"
)


@pytest.mark.sampled(one_in=3)
@needs_the_version_of_the_page
@pytest.mark.parametrize("model_type", [*SERVED, *REFUSED])
def test_the_page_agrees_with_a_trial(model_type: str, tmp_path: Path) -> None:
    assert line_of(cover(model_type, tmp_path)) == LINES[model_type]


@pytest.mark.slow
@needs_the_version_of_the_page
@pytest.mark.parametrize("model_type", sorted(set(LINES) - {*SERVED, *REFUSED}))
def test_the_rest_of_the_page_agrees_with_trials(model_type: str, tmp_path: Path) -> None:
    assert line_of(cover(model_type, tmp_path)) == LINES[model_type]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("model_type", HALF_PRECISION_TYPES)
@pytest.mark.parametrize("is_native", [True, False], ids=["C++", "torch"])
def test_half_precision_is_served(
    model_type: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_native: bool
) -> None:
    library = native_library() if is_native else None
    if is_native and library is None:
        pytest.skip("there are no kernels in C++ on this machine")
    monkeypatch.setattr("radixkv.model.model.native_library", lambda: library)
    backend = "native" if is_native else "plain"
    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.gemm_backends", lambda _: (backend,))
    kernels = TorchKernels() if library is None else NativeKernels(library)
    write_checkpoint(small_config(model_type), tmp_path, max_shard_size="10MB")
    for exactness in ("exact", "fast"):
        config = ModelConfig(path=str(tmp_path), device="cpu", dtype=dtype, exactness=exactness)
        check_model(load_model(config), kernels, BLOCK_SIZE)


@needs_the_version_of_the_page
def test_the_page_has_every_type_and_the_engines_that_serve_it() -> None:
    assert sorted(LINES) == covered_types()
    for model_type, line in LINES.items():
        marks = [mark.strip() for mark in line.split("|")[2:4]]
        assert marks == ["yes" if engine in engines_of(model_type) else "" for engine in ("vLLM", "SGLang")]


def test_page_and_readme_count_at_least_fifty_served_types() -> None:
    served = PAGE.partition("## Served")[2].partition("## Refused")[0].count("| `")
    assert served >= 50
    assert PAGE.splitlines()[2].startswith(f"{served} of {len(LINES)} types")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{served} types of causal models](docs/MODELS.md)" in " ".join(readme.split())
