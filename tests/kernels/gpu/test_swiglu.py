import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.gpu.swiglu import swiglu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = 4 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    return gate.to(device, dtype), up.to(device, dtype)


@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (2, 3, 128), (3, 1500), (2, 4096)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_torch_swiglu(dtype: torch.dtype, shape: tuple[int, ...], kernel_device: str) -> None:
    gate, up = make_inputs(shape, dtype, kernel_device)
    got = swiglu(gate, up)
    assert (got.shape, got.dtype) == (gate.shape, dtype)
    expected = reference.swiglu(gate, up)
    torch.testing.assert_close(got, expected, rtol=max(3e-6, 2 * torch.finfo(dtype).eps), atol=0)
    if dtype != torch.float32:  # in half precision, rounding hides other exponentials in all but a few elements
        assert (got != expected).float().mean() <= 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gate_is_rounded_before_the_multiplication(dtype: torch.dtype, kernel_device: str) -> None:
    gate, up = make_inputs((9, 128), dtype, kernel_device)
    rounded_once = (torch.nn.functional.silu(gate.float()) * up.float()).to(dtype)
    assert (swiglu(gate, up) != rounded_once).float().mean() > 0.1


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # in the interpreter
def test_large_numbers_saturate(kernel_device: str) -> None:
    gate = torch.tensor([[-1e4, -200.0, 200.0, 1e4, float("nan")]], device=kernel_device)
    got = swiglu(gate, torch.ones_like(gate))
    torch.testing.assert_close(got, gate.clamp(min=0), equal_nan=True)


@pytest.mark.parametrize("shape", [(1, 1, 6), (1, 37, 6), (5, 6), (6,)])
def test_halves_of_a_merged_linear_layer_are_gated_in_place(shape: tuple[int, ...], kernel_device: str) -> None:
    gate, up = make_inputs(shape, torch.bfloat16, kernel_device)
    merged = torch.cat((gate, up), dim=-1)
    got = swiglu(merged[..., :6], merged[..., 6:])
    assert got.is_contiguous()
    assert torch.equal(got, swiglu(gate, up))


def test_any_strides_and_empty_inputs_are_supported(kernel_device: str) -> None:
    gate, up = make_inputs((37, 6), torch.bfloat16, kernel_device)
    assert torch.equal(swiglu(gate.t(), up.t()), swiglu(gate, up).t())
    assert torch.equal(swiglu(gate[3:], up[3:]), swiglu(gate, up)[3:])
    assert torch.equal(swiglu(gate[3], up[3]), swiglu(gate, up)[3])
    assert swiglu(gate[:0], up[:0]).shape == (0, 6)


@pytest.mark.parametrize(
    "up", [torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.bfloat16), torch.zeros(2, 4, device="meta")]
)
def test_shapes_that_do_not_fit_are_refused(up: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"^up: expected torch\.float32 \(2, 4\) on cpu, got "):
        swiglu(torch.zeros(2, 4), up)
