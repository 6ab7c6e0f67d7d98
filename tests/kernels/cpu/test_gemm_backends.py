import pytest
import torch

from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, QUANTIZED_BITS, aligned_rows, gemm_backends

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", sorted(GEMM_BACKENDS.keys() - {"int8", *QUANTIZED_BITS}))
def test_every_backend_computes_a_linear_layer(name: str, dtype: torch.dtype) -> None:
    rows, weight, bias = (each.to(dtype) for each in (random(33, 96), random(40, 96) / 10, random(40)))
    if name not in gemm_backends(weight):
        pytest.skip(f"{name} does not take {dtype} on this machine")
    backend = GEMM_BACKENDS[name]
    packed = backend.pack(weight)
    for bias_or_none in (None, bias):
        for num_rows in (1, 2, 33):
            expected = torch.nn.functional.linear(
                rows[:num_rows].double(), weight.double(), None if bias_or_none is None else bias_or_none.double()
            )
            got = backend.multiply(rows[:num_rows], packed, bias_or_none)
            assert (got.shape, got.dtype) == (expected.shape, dtype)
            assert got.is_contiguous()
            assert (got - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


def test_only_float16_has_a_backend_that_computes_in_float32() -> None:
    assert "float32" in gemm_backends(torch.empty(4, 4, dtype=torch.float16))
    assert "float32" not in gemm_backends(torch.empty(4, 4))


def test_onednn_is_excluded_for_dtypes_without_hardware_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.kernels.cpu.gemm_backends._onednn_computes", lambda dtype: dtype == torch.float32)
    assert set(gemm_backends(torch.empty(4, 4, dtype=torch.float16))) - {"native"} == {"plain", "float32"}
    assert set(gemm_backends(torch.empty(4, 4))) - {"packed", "native"} == {"plain", "blocked"}


def test_mkl_is_excluded_if_torch_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_available in (True, False):
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda answer=is_available: answer)
        assert ("packed" in gemm_backends(torch.empty(4, 4))) == is_available


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this torch is built without MKL")
def test_mkl_multiplies_any_row_count_with_a_weight_packed_for_another() -> None:
    rows, weight = random(1030, 96), random(40, 96)
    expected = rows.double() @ weight.double().t()
    backend = GEMM_BACKENDS["packed"]
    packed = backend.pack(weight)
    for num_rows in [*range(1, 66), 511, 512, 513, 1030]:
        got = backend.multiply(rows[:num_rows], packed, None)
        assert (got - expected[:num_rows]).abs().max() <= 1e-5 * expected.abs().max(), num_rows


def test_only_unaligned_rows_are_copied_to_an_aligned_address() -> None:
    numbers = torch.arange(100.0)
    assert aligned_rows(numbers[:20].view(2, 10)).data_ptr() == numbers.data_ptr()
    unaligned = numbers[3:23].view(2, 10)
    aligned = aligned_rows(unaligned)
    assert aligned.data_ptr() % 64 == 0
    assert torch.equal(aligned, unaligned)
