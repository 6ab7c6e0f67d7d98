"""A hit never changes a bit: nearly 700 random cases over thirteen architectures. `make exact` runs more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError, UnsupportedModel
from radixkv.kernels.cancelling_inputs import sensitive_linear
from radixkv.model.architecture import check_architecture
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.exactness import ExactFunctions
from radixkv.model.layers.gemm_tuner import GemmTuner
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.startup.model_check import check_model
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint
from tests.model.exact.exact_cases import MODELS, models_for, run_cases
from tests.processor import needs_exact_int8, skip_without_kernels_for

# All models but one of the two with latents; slow tests run both of these.
QUICK = [name for name in MODELS if name != "deepseek_v2"]

# (dtype of the model, dtype of the pool). Quick tests cover each model and each dtype; slow tests all combinations.
POOLS = [("float32", "bf16"), ("bfloat16", "fp8"), ("float32", "int8"), ("bfloat16", "k8v4")]
TWO_POOLS = [("float32", "auto"), ("bfloat16", "int8")]

WINDOWED = ["mistral", "gemma2", "qwen2", "gpt_oss", "gemma4_text"]


def cases_of(models: list[str], choices: list[tuple[str, ...]], *, num_long: int = 1) -> list[Any]:
    """Return the parameters of all models with all choices, with the marks of pytest.

    `make test` takes one choice per model, in turn, and `make test-long` the `num_long` next ones. The others are slow.
    """

    def marks(model_index: int, choice_index: int) -> Any:
        distance = (choice_index - model_index) % len(choices)
        if distance == 0:
            return ()
        return pytest.mark.long if distance <= num_long else pytest.mark.slow

    return [
        pytest.param(model, *choice, marks=marks(model_index, choice_index))
        for model_index, model in enumerate(models)
        for choice_index, choice in enumerate(choices)
    ]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    """Use two threads: then the division of work among them, and so the summation order, may depend on the batch."""
    usual_num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual_num_threads)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("model", "dtype"), cases_of(QUICK, [("float32",), ("bfloat16",)]))
def test_no_bit_depends_on_the_cache(model: str, dtype: str) -> None:
    counts, first_difference = run_cases(model, dtype, "exact", num_cases=12, seed=len(model))
    assert first_difference == ""
    assert counts["cases"] == 12
    assert counts["partial hits"] >= 6
    # The states of lfm2 are kept at block boundaries, so its hits end there.
    assert counts["hits inside a block"] >= (0 if model == "lfm2" else 5)
    assert counts["turns"] >= 2


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("model", "dtype", "kv_dtype"), cases_of([name for name in QUICK if name != "deepseek_v3"], POOLS)
)
def test_no_bit_of_a_quantized_pool_depends_on_the_cache(model: str, dtype: str, kv_dtype: str) -> None:
    counts, first_difference = run_cases(model, dtype, "exact", num_cases=6, seed=len(model), kv_dtype=kv_dtype)
    assert first_difference == ""
    assert counts["cases"] == 6
    assert counts["partial hits"] >= 3


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "int8"), ("bfloat16", "fp8")])
def test_no_bit_of_quantized_latents_depends_on_the_cache(dtype: str, kv_dtype: str) -> None:
    counts, first_difference = run_cases("deepseek_v3", dtype, "exact", num_cases=4, seed=1, kv_dtype=kv_dtype)
    assert first_difference == ""
    assert counts["partial hits"] >= 2


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("model", "dtype", "kv_dtype"), cases_of(WINDOWED, TWO_POOLS))
def test_no_bit_depends_on_released_blocks_of_windowed_layers(model: str, dtype: str, kv_dtype: str) -> None:
    counts, first_difference = run_cases(
        model, dtype, "exact", num_cases=16, seed=len(model), kv_dtype=kv_dtype, is_divided=True
    )
    assert first_difference == ""
    assert counts["partial hits"] >= 5
    assert counts["hits inside a block"] >= 4
    assert counts["hits without all parts"] >= 4
    assert counts["turns"] >= 1


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("model", "kv_dtype"), [("mistral", "auto"), ("gemma2", "int8"), ("gemma4_text", "int8")])
def test_no_bit_depends_on_what_windowed_layers_load(model: str, kv_dtype: str) -> None:
    counts, first_difference = run_cases(
        model, "float32", "exact", num_cases=20, seed=7, kv_dtype=kv_dtype, stores=["host", "disk"], is_divided=True
    )
    assert first_difference == ""
    assert counts["host hits"] + counts["disk hits"] >= 3
    assert counts["hits without all parts"] >= 4


def test_models_that_a_gpu_would_refuse_are_not_tried_there() -> None:
    served = []
    for name, config in MODELS.items():
        module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
        with contextlib.suppress(UnsupportedModel):
            check_architecture(type(module), config, torch.device("cuda"))
            model = Model(name, module, torch.device("cpu"), is_exact=False, is_fused=False)
            if not model.kv_shape.heads:  # set if layers have different shapes, which a GPU does not support
                served.append(name)
    assert models_for("cuda") == served != models_for("cpu") == list(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", WINDOWED)
def test_no_bit_of_many_prompts_depends_on_released_blocks(model: str, dtype: str) -> None:
    counts, first_difference = run_cases(model, dtype, "exact", num_cases=60, num_adapters=2, is_divided=True)
    assert first_difference == ""
    assert counts["hits without all parts"] >= 20


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("weights", [pytest.param("int8", marks=(needs_exact_int8, pytest.mark.long)), "q8", "q4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["qwen3", "mixtral", "gpt2"])
def test_no_bit_of_quantized_weights_depends_on_the_cache(model: str, dtype: str, weights: str) -> None:
    skip_without_kernels_for(weights)
    counts, first_difference = run_cases(model, dtype, "exact", num_cases=8, seed=len(model), weights=weights)
    assert first_difference == ""
    assert counts["partial hits"] >= 4


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("model", "dtype", "weights"),
    [
        *((model, "float32", "auto") for model in ("llama", "phi3", "gpt2", "deepseek_v3", "lfm2")),
        ("qwen3", "bfloat16", "auto"),
        pytest.param("qwen2", "float32", "int8", marks=(needs_exact_int8, pytest.mark.long)),
        ("qwen2", "float32", "q4"),
    ],
)
def test_no_bit_of_an_adapter_depends_on_the_cache_or_on_other_adapters(model: str, dtype: str, weights: str) -> None:
    skip_without_kernels_for(weights)
    counts, first_difference = run_cases(
        model, dtype, "exact", num_cases=6, seed=len(model) % 9, weights=weights, num_adapters=2
    )
    assert first_difference == ""
    assert counts["partial hits"] >= 2
    assert counts["adapters"] >= 2
    assert counts["next to other adapters"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(dtype, kv_dtype) for dtype in ("float32", "bfloat16") for kv_dtype in ("auto", "int8", "fp8", "k8v4")],
)
@pytest.mark.parametrize("model", MODELS)
def test_no_bit_of_many_prompts_depends_on_the_cache(model: str, dtype: str, kv_dtype: str) -> None:
    counts, first_difference = run_cases(model, dtype, "exact", num_cases=60, kv_dtype=kv_dtype)
    assert first_difference == ""
    assert counts["partial hits"] >= 40


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_no_bit_of_many_adapters_depends_on_the_cache(model: str, dtype: str) -> None:
    counts, first_difference = run_cases(model, dtype, "exact", num_cases=60, num_adapters=4)
    assert first_difference == ""
    assert counts["next to other adapters"] >= 20


def test_no_bit_of_float16_depends_on_the_cache() -> None:
    counts, first_difference = run_cases("llama", "float16", "exact", num_cases=8, seed=1)
    assert first_difference == ""
    assert counts["partial hits"] >= 4


def test_the_cases_detect_results_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Model.forward

    def depend_on_the_batch(
        model: Model, input_ids: torch.Tensor, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, is_finite = forward(model, input_ids, *arguments, **options)
        return logits * (1 + 1e-6 * input_ids.numel()), is_finite

    monkeypatch.setattr(Model, "forward", depend_on_the_batch)
    counts, first_difference = run_cases("llama", "float32", "fast", num_cases=20)
    assert counts["different"] > 0
    assert first_difference.startswith("llama, auto, seed 0, case ")


@pytest.mark.parametrize("part", ["mlp.act_fn", "self_attn.q_proj", "input_layernorm"])
def test_functions_that_are_not_exact_are_refused_by_name(part: str, tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(write_checkpoint(CONFIGS["llama"], tmp_path)), device="cpu"))

    def depend_on_the_batch(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + 1e-6 * output.shape[1])

    model.module.get_submodule(f"model.layers.1.{part}").register_forward_hook(depend_on_the_batch)
    with pytest.raises(UnsupportedModel, match=rf"^model\.layers\.1\.{part}: expected bitwise identical results"):
        check_model(model, TorchKernels(), 16)


def test_a_matmul_that_is_not_batch_invariant_is_rejected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_checkpoint(CONFIGS["llama"], tmp_path)

    monkeypatch.setattr(GemmTuner, "choose", lambda _, weight, *__, **___: None)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight: no batch-invariant matmul"):
        load_model(ModelConfig(path=str(directory), device="cpu"))


@pytest.mark.parametrize("num_columns", [8, 64, 96, 896])
@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows.mean(-1, keepdim=True),
        lambda rows: rows.sum(-1, keepdim=True),
        lambda rows: functional.layer_norm(rows, rows.shape[-1:]),
        lambda rows: functional.rms_norm(rows, rows.shape[-1:]),
        lambda rows: rows.softmax(-1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_adds_up_a_row_in_the_same_order_in_any_batch_of_two_or_more_rows(
    dtype: torch.dtype, function: Callable[[torch.Tensor], torch.Tensor], num_columns: int
) -> None:
    """Exact mode leaves these functions to torch. The inputs are sensitive to the order of summation."""
    rows, weight, _ = sensitive_linear(torch.empty(1, num_columns, dtype=dtype), None, 600)
    rows = rows * weight
    whole = function(rows[None])[0]
    for start, end in ((0, 2), (5, 7), (9, 12), (0, 16), (3, 35), (100, 308), (9, 521), (520, 600)):
        assert torch.equal(function(rows[None, start:end].clone())[0], whole[start:end])


def test_fast_mode_leaves_torch_alone(tmp_path: Path) -> None:
    model = load_model(
        ModelConfig(path=str(write_checkpoint(CONFIGS["llama"], tmp_path)), device="cpu", exactness="fast")
    )
    assert not model.is_exact
    assert not isinstance(model._exact_mode, ExactFunctions)
    check_model(model, TorchKernels(), 16)
