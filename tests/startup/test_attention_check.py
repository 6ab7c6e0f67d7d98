from typing import Any, Literal

import pytest
import torch

from radixkv.errors import UnsupportedModel
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cpu import attention as cpu_attention
from radixkv.model.attention.interface import AttentionKind, AttentionUse
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.attention.triton_kernels import TritonKernels
from radixkv.startup import attention_check
from radixkv.startup.attention_check import check_attention
from radixkv.storage.device_pool import KVShape
from tests.kernels.cases import attention_by_num_rows

KIND = AttentionKind(4, window=None, softcap=None)
CPU = torch.device("cpu")


def attention_use(
    dtype: torch.dtype, kv_dtype: str = "auto", *, kind: AttentionKind = KIND, head_dim: int = 32, is_exact: bool = True
) -> AttentionUse:
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=head_dim, dtype=dtype).stored_as(kv_dtype)
    return AttentionUse((kind,), dtype, shape, 16, CPU, is_exact)


def latent_attention_use(dtype: torch.dtype, kv_dtype: str = "auto") -> AttentionUse:
    shape = KVShape(num_layers=3, num_kv_heads=1, head_dim=72, dtype=dtype, is_latent=True).stored_as(kv_dtype)
    return AttentionUse((KIND,), dtype, shape, 16, CPU, is_exact=True)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_kernels_pass_with_latents(dtype: torch.dtype, kv_dtype: str) -> None:
    check_attention(TorchKernels(), latent_attention_use(dtype, kv_dtype))


@pytest.mark.parametrize("sums_over", ["keys", "head_dim"])
def test_batch_dependent_bits_with_latents_are_detected(
    sums_over: Literal["keys", "head_dim"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "_fused_attention", attention_by_num_rows(sums_over))
    with pytest.raises(UnsupportedModel, match="expected bitwise identical results in one step and in parts"):
        check_attention(TorchKernels(), latent_attention_use(torch.float32))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "fp8", "int8", "k8v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [KIND, AttentionKind(7 * 2, 300, None), AttentionKind(2, 100, 30.0), AttentionKind(4, None, None, has_sinks=True)],
    ids=str,
)
def test_our_kernels_pass(
    kind: AttentionKind, dtype: torch.dtype, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a negative tolerance the check fails, so results are really compared."""
    kernels, use_of_kind = TorchKernels(), attention_use(dtype, kv_dtype, kind=kind)
    check_attention(kernels, use_of_kind)
    monkeypatch.setitem(attention_check._TOLERANCE, dtype, -1.0)
    with pytest.raises(UnsupportedModel, match=r"expected a relative distance of at most -1"):
        check_attention(kernels, use_of_kind)


@pytest.mark.parametrize("head_dim", [80, 256])
@pytest.mark.parametrize("kv_dtype", ["auto", "k8v4"])
def test_rounding_stays_far_below_the_bound(kv_dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The distances are between 0.001 and 0.015, and the tolerance is 0.03, so no correct model is refused."""
    use_of_eight_heads = attention_use(torch.bfloat16, kv_dtype, kind=AttentionKind(8, None, None), head_dim=head_dim)
    monkeypatch.setitem(attention_check._TOLERANCE, torch.bfloat16, 0.015)
    check_attention(TorchKernels(), use_of_eight_heads)
    monkeypatch.setitem(attention_check._TOLERANCE, torch.bfloat16, 0.001)
    with pytest.raises(UnsupportedModel, match=r"expected a relative distance of at most 0\.001"):
        check_attention(TorchKernels(), use_of_eight_heads)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_wrong_read_of_the_pool_is_detected(is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_blocks = cpu_attention._copy_blocks
    monkeypatch.setattr(cpu_attention, "_copy_blocks", lambda *inputs: copy_blocks(*inputs) * 1.05)
    with pytest.raises(UnsupportedModel, match=r"^attention over k8v4 on cpu: expected a relative distance of at most"):
        check_attention(TorchKernels(), attention_use(torch.bfloat16, "k8v4", is_exact=is_exact))


def test_kernels_that_fail_to_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("fp8e4nv not supported in this architecture\nand a long dump")

    monkeypatch.setattr(TorchKernels, "write_kv", fail)
    with pytest.raises(
        UnsupportedModel, match=r"^attention over fp8 on cpu: does not run there: RuntimeError: fp8e4nv"
    ):
        check_attention(TorchKernels(), attention_use(torch.float32, "fp8"))


def test_on_a_gpu_the_check_of_parts_has_rows_that_are_joined_with_those_of_another_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels join rows in exact mode too, since the shared prefix of the check is longer than a split of the keys."""
    batches: list[PagedBatch] = []
    attend = TorchKernels.paged_attention

    def recorded_attention(
        self: TorchKernels, query: Any, pool: Any, layer: int, batch: PagedBatch, scoring: Any
    ) -> torch.Tensor:
        batches.append(batch)
        return attend(self, query, pool, layer, batch, scoring)

    monkeypatch.setattr(TorchKernels, "paged_attention", recorded_attention)
    monkeypatch.setitem(attention_check._NUM_TOKENS, "cpu", attention_check._NUM_TOKENS["cuda"])
    check_attention(TorchKernels(), attention_use(torch.bfloat16))
    part_batches = [batch for batch in batches if batch.num_requests == 3]
    assert part_batches
    for batch in part_batches:
        for is_exact in (False, True):
            kernels = TritonKernels(is_exact=is_exact)
            plan = kernels.plan(batch, 4, 2, torch.bfloat16, window=None, tile_rows=128)
            assert len(plan.joined_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sums_over", ["keys", "head_dim"])
def test_batch_dependent_bits_are_detected_in_exact_mode(
    sums_over: Literal["keys", "head_dim"], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_attention, "_fused_attention", attention_by_num_rows(sums_over))
    check_attention(TorchKernels(), attention_use(dtype, is_exact=False))
    with pytest.raises(
        UnsupportedModel, match=r"^attention over .*: expected bitwise identical results in one step and in"
    ):
        check_attention(TorchKernels(), attention_use(dtype))
