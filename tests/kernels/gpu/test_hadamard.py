import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.gpu.hadamard import rotate
from radixkv.kernels.quantization import INT4, dequantize, quantize


@pytest.mark.parametrize("head_dim", [16, 32, 80, 96, 128, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_reference_to_the_bit(dtype: torch.dtype, head_dim: int, kernel_device: str) -> None:
    for num_tokens, num_heads in ((1, 1), (1, 3), (37, 2)):
        vectors = torch.randn(num_heads, num_tokens, head_dim, device=kernel_device).to(dtype).transpose(0, 1)
        for wanted in (dtype, torch.float32):
            assert torch.equal(rotate(vectors, wanted), reference.rotate(vectors, wanted))


def test_strided_vectors_are_refused(kernel_device: str) -> None:
    vectors = torch.zeros(3, 16, 2, device=kernel_device).transpose(1, 2)
    with pytest.raises(ValueError, match="expected a contiguous last dimension"):
        rotate(vectors, torch.float32)


@pytest.mark.parametrize("head_dim", [1, 48, 64, 100, 128])
def test_products_stay_and_twice_is_nothing(head_dim: int) -> None:
    first, second = torch.randn(2, 7, 3, head_dim, dtype=torch.float32).unbind(0)
    rotated = [reference.rotate(each, torch.float32) for each in (first, second)]
    torch.testing.assert_close((rotated[0] * rotated[1]).sum(-1), (first * second).sum(-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(reference.rotate(rotated[0], torch.float32), first, atol=1e-5, rtol=1e-5)


def test_the_bits_of_a_vector_depend_on_it_alone() -> None:
    vectors = torch.randn(40, 5, 96)
    together = reference.rotate(vectors, torch.float32)
    for token in (0, 17, 39):
        assert torch.equal(reference.rotate(vectors[token : token + 1], torch.float32)[0], together[token])


def test_numbers_that_are_large_cost_the_others_less() -> None:
    vectors = torch.randn(256, 1, 128)
    vectors[..., 5] *= 16
    plain = dequantize(*quantize(vectors, INT4), INT4)
    rotated = dequantize(*quantize(reference.rotate(vectors, torch.float32), INT4), INT4)
    errors = [(each - vectors).norm() for each in (plain, reference.rotate(rotated, torch.float32))]
    assert errors[1] < 0.7 * errors[0]


def test_what_is_not_finite_stays_so() -> None:
    vectors = torch.zeros(2, 1, 16)
    vectors[1, 0, 3] = torch.inf
    assert reference.rotate(vectors, torch.float32).isfinite().all(-1).tolist() == [[True], [False]]
