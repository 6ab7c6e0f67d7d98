import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.errors import UnsupportedModel
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.interface import AttentionCall
from radixkv.model.attention.paged_step import PagedStep
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.startup import model_check
from radixkv.startup.model_check import check_model
from tests.model.exact.checkpoints import CONFIGS, write_checkpoint


@pytest.fixture
def gemma2(tmp_path: Path) -> Model:
    return load_model(ModelConfig(path=str(write_checkpoint(CONFIGS["gemma2"], tmp_path)), device="cpu"))


def test_state_outside_the_cache_is_detected(gemma2: Model) -> None:
    def add_previous_token(_: object, __: object, output: torch.Tensor) -> torch.Tensor:
        return output + 0.1 * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    gemma2.module.model.layers[1].mlp.register_forward_hook(add_previous_token)
    with pytest.raises(UnsupportedModel, match="over 19 cached tokens"):
        check_model(gemma2, TorchKernels(), 16)


@pytest.mark.parametrize("ignored", ["window", "softcap"])
def test_an_ignored_attention_feature_is_detected(
    ignored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = PagedStep.attend

    def attend_without(self: PagedStep, call: AttentionCall) -> torch.Tensor:
        return attend(self, call._replace(scoring=dataclasses.replace(call.scoring, **{ignored: None})))

    config = copy.deepcopy(CONFIGS["gemma2"])
    config.attn_logit_softcapping = 5.0  # the scores of random weights are small
    gemma2 = load_model(ModelConfig(path=str(write_checkpoint(config, tmp_path)), device="cpu"))
    check_model(gemma2, TorchKernels(), 16)
    monkeypatch.setattr(PagedStep, "attend", attend_without)
    with pytest.raises(UnsupportedModel, match="over 0 cached tokens"):
        check_model(gemma2, TorchKernels(), 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a negative tolerance the check fails, so logits are really compared."""
    model = load_model(ModelConfig(dtype=dtype, device="cpu"))
    check_model(model, TorchKernels(), 16)
    monkeypatch.setitem(model_check.LOGITS_TOLERANCE, model.kv_shape.dtype, -1.0)
    with pytest.raises(UnsupportedModel, match="over 0 cached tokens"):
        check_model(model, TorchKernels(), 16)


def model_at_distance(distance: float) -> Model:
    """Return a model in bfloat16 whose logits with our attention are about this far from those of eager attention."""
    model = load_model(ModelConfig(dtype="bfloat16", device="cpu"))

    def move(_: object, arguments: object, keywords: dict[str, Any], output: Any) -> None:
        if keywords.get("radix_step") is not None:
            output.logits.mul_(1 + distance)

    model.module.register_forward_hook(move, with_kwargs=True)
    return model


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("sdpa_distance", "raises_tolerance"), [(0.02, False), (0.06, True), (10.0, True)])
@pytest.mark.parametrize("our_distance", [0.07, 0.12])
def test_the_tolerance_is_the_distance_between_two_transformers_implementations(
    sdpa_distance: float, raises_tolerance: bool, our_distance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is at least the usual one, 0.05, and at most twice that."""
    model = model_at_distance(our_distance)
    transformers_logits = model_check._transformers_logits

    def distant_logits(model: Model, tokens: bytes, ends: list[int], attention: str = "eager") -> torch.Tensor:
        logits = transformers_logits(model, tokens, ends)
        return logits * (1 + sdpa_distance) if attention == "sdpa" else logits

    monkeypatch.setattr(model_check, "_transformers_logits", distant_logits)
    if raises_tolerance and our_distance < 2 * 0.05:
        check_model(model, TorchKernels(), 16)
    else:
        with pytest.raises(UnsupportedModel, match="expected a relative distance"):
            check_model(model, TorchKernels(), 16)


def test_without_a_second_implementation_the_usual_tolerance_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_at_distance(0.07)
    monkeypatch.setattr(type(model.module), "_supports_sdpa", False)
    with pytest.raises(UnsupportedModel, match=r"expected a relative distance of at most 0\.05, got 0\.0[678]"):
        check_model(model, TorchKernels(), 16)
    assert model.module.config._attn_implementation == ATTENTION_NAME


def test_transformers_implementations_are_close_and_running_them_restores_our_attention() -> None:
    model = load_model(ModelConfig(dtype="bfloat16", device="cpu"))
    tokens = np.arange(20, dtype="<u4").tobytes()
    eager, sdpa = (model_check._transformers_logits(model, tokens, [20], attention) for attention in ("eager", "sdpa"))
    assert 0 < model_check._distance(sdpa, eager) < 0.05
    assert model.module.config._attn_implementation == ATTENTION_NAME


def test_a_model_that_eager_attention_cannot_compute_is_refused_by_name(gemma2: Model) -> None:
    def fail(*_: object) -> None:
        if gemma2.module.config._attn_implementation == "eager":
            raise RuntimeError("no such shape\nand more")

    gemma2.module.model.register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModel, match=r"Gemma2\w+: .* RuntimeError: no such shape$"):
        check_model(gemma2, TorchKernels(), 16)


def test_our_attention_is_restored(gemma2: Model) -> None:
    check_model(gemma2, TorchKernels(), 16)
    assert gemma2.module.config._attn_implementation == ATTENTION_NAME


@pytest.mark.parametrize(("end", "cached"), [(19, 0), (20, 19), (37, 20)])
def test_a_wrong_result_of_any_part_is_detected_in_fast_mode(end: int, cached: int) -> None:
    model = load_model(ModelConfig(device="cpu", exactness="fast"))

    def spoil(_: object, arguments: object, keywords: dict[str, Any], output: Any) -> Any:
        if keywords.get("radix_step") is not None and int(keywords["position_ids"][0, -1]) == end - 1:
            output.logits.mul_(2)
        return output

    check_model(model, TorchKernels(), 16)
    model.module.register_forward_hook(spoil, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match=f"over {cached} cached tokens"):
        check_model(model, TorchKernels(), 16)


@pytest.mark.parametrize("exactness", ["exact", "fast"])
def test_a_quantized_pool_is_tried_in_either_mode(exactness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(ModelConfig(device="cpu", exactness=exactness))
    tried = []
    monkeypatch.setattr(model_check, "check_attention", lambda _, use: tried.append(use.shape.dtype))
    check_model(model, TorchKernels(), 16, model.kv_shape.stored_as("int8"))
    assert tried == [torch.float32, torch.int8]
