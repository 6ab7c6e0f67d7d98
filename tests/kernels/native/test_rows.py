"""Row operations in C++ are compared with torch, and rows with themselves in other batches."""

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from radixkv.kernels import reference
from radixkv.kernels.cpu.row_norm import row_norm
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.native.rows import NativeRows, address_of, has_adjacent_heads
from radixkv.kernels.norm_style import GEMMA, LLAMA, TORCH, NormStyle

from ..cases import clone, poisoned_pool

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 15, 16, 37, 896]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def rows(library: ctypes.CDLL) -> NativeRows:
    return NativeRows(library)


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Divide large calls among three threads."""
    usual_num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(usual_num_threads)


def distance_in_last_places(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest distance, in units in the last place of the largest number of the same row."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    wide = expected.double()
    distance = (got.double() - wide).abs() / wide.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return float(distance.max()) / torch.finfo(expected.dtype).eps


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("style", [LLAMA, GEMMA, TORCH])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_match_torch(width: int, dtype: torch.dtype, style: NormStyle, rows: NativeRows) -> None:
    some = (torch.randn(5, 3, width) * torch.tensor([1e-3, 1.0, 50.0])[:, None]).to(dtype)
    weight = torch.randn(width).to(dtype) if style.rounds_first else torch.randn(width) + style.weight_offset
    assert (
        distance_in_last_places(
            rows.norm(weight, 1e-5, style)(some), row_norm(some, weight, torch.tensor([1e-5]), style)
        )
        <= 4
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_accept_strided_rows(dtype: torch.dtype, rows: NativeRows) -> None:
    wide = torch.randn(7, 4, 48).to(dtype)
    norm = rows.norm(torch.ones(48, dtype=dtype), 1e-5, LLAMA)
    for some in (wide[:, 1], wide[:, 1:3], wide.transpose(0, 1)):
        assert torch.equal(norm(some), norm(some.contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 34, 64, 80])
def test_rope_is_bitwise_identical_to_torch(head_dim: int, dtype: torch.dtype, rows: NativeRows) -> None:
    whole = torch.randn(9, 5, head_dim).to(dtype)
    heads, angles = whole[:, :3], torch.randn(9, head_dim)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    half = head_dim // 2
    rotated_halves = torch.cat((-heads[..., half:], heads[..., :half]), -1)
    assert torch.equal(rows.rotate(heads, cos, sin), heads * cos[:, None] + rotated_halves * sin[:, None])


def test_cosines_and_sines_of_other_layouts_are_rejected(rows: NativeRows) -> None:
    heads, angles = torch.randn(3, 4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    with pytest.raises(ValueError, match=r"^cos: expected .* in torch.bfloat16, got .* in torch.float32$"):
        rows.rotate(heads, angles.float(), angles)
    with pytest.raises(ValueError, match=r"^sin: .* got a strided one"):
        rows.rotate(heads, angles, angles.mT.contiguous().mT)
    with pytest.raises(ValueError, match=r"^sin: .* of shape \(3, 8\)"):
        rows.rotate(heads, angles, angles[:2])
    with pytest.raises(ValueError, match=r"^heads: .* got strides \(32, 16, 1\)"):
        rows.rotate(heads[:, ::2], angles, angles)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_gates_match_torch(width: int, dtype: torch.dtype, rows: NativeRows) -> None:
    gate_and_up = (torch.randn(2, 7, 2 * width) * 6).to(dtype)
    gate_and_up[0, 0, 0], gate_and_up[0, 1, 0] = -200, 200
    expected = functional.silu(gate_and_up[..., :width]) * gate_and_up[..., width:]
    assert distance_in_last_places(rows.gate(gate_and_up), expected) <= (
        16 if dtype == torch.float32 else 2
    )  # exponents are rounded, too


@pytest.mark.parametrize("function", ["norm", "gate", "rotate"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("three_threads")
def test_a_row_is_bitwise_identical_alone_and_among_thousands(
    dtype: torch.dtype, function: str, rows: NativeRows
) -> None:
    some = torch.randn(2001, 64).to(dtype)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "norm": rows.norm(torch.randn(64).to(dtype), 1e-5, LLAMA),
        "gate": rows.gate,
        "rotate": lambda each: rows.rotate(each[:, None], each.cos(), each.sin())[:, 0],
    }
    together = functions[function](some)
    for i in (0, 1, 999, 2000):
        assert torch.equal(functions[function](some[i : i + 1]), together[i : i + 1])
    assert torch.equal(functions[function](some.flip(0)), together.flip(0))


def test_no_rows_give_an_empty_result(rows: NativeRows) -> None:
    assert rows.gate(torch.empty(0, 8)).shape == (0, 4)
    assert rows.norm(torch.ones(8), 1e-5, LLAMA)(torch.empty(0, 8)).shape == (0, 8)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("is_by_layer", [True, False], ids=["by layer", "by block"])
@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 37])
def test_keys_and_values_are_written_as_by_the_reference(
    head_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype, is_by_layer: bool, rows: NativeRows
) -> None:
    pool = poisoned_pool(5, 2, 16, head_dim, kv_dtype, is_by_layer=is_by_layer)
    heads = torch.randn(11, 6, head_dim).to(dtype)
    key, value = heads[:, 1:3], heads[:, 4:]
    slots = torch.randperm(80)[:11]
    assert_written(rows, pool, key, value, slots)


def assert_written(
    rows: NativeRows, pool: KVPool, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor
) -> None:
    """Assert that C++ and the reference write the same bits of K and V, and record the same magnitudes."""
    assert has_adjacent_heads(key)
    expected, largest = clone_of(pool), torch.rand(len(slots), key.shape[1])
    expected_largest = largest.clone()
    reference.write_kv(key, value, slots, expected, 1, expected_largest)
    rows.write_kv(key, value, slots, pool, 1, largest)
    assert torch.equal(pool.blocks, expected.blocks)
    assert torch.equal(largest.view(torch.int32), expected_largest.view(torch.int32))
    rows.write_kv(key, value, slots, pool, 1)
    assert torch.equal(pool.blocks, expected.blocks)


def clone_of(pool: KVPool) -> KVPool:
    if not pool.is_latent:
        return clone(pool)
    copied = poisoned_pool(len(pool.blocks), 1, pool.block_size, pool.head_dim, pool.dtype, is_latent=True)
    copied.blocks.copy_(pool.blocks)
    return copied


def test_latents_are_written_once(rows: NativeRows) -> None:
    pool = poisoned_pool(3, 1, 16, 72, is_latent=True)
    assert_written(rows, pool, torch.randn(5, 1, 72), None, torch.tensor([3, 40, 0, 17, 18]))


@pytest.mark.parametrize("spoiled", [float("inf"), float("-inf"), float("nan"), -float("nan")])
def test_magnitudes_reveal_non_finite_values(spoiled: float, rows: NativeRows) -> None:
    pool, largest = poisoned_pool(1), torch.zeros(3, 2)
    key, value = torch.randn(3, 2, 32), torch.randn(3, 2, 32)
    key[0, 1, 7] = value[2, 0, 31] = spoiled
    rows.write_kv(key, value, torch.arange(3), pool, 1, largest)
    assert largest.isfinite().tolist() == [[True, False], [True, True], [False, True]]


def test_writes_of_unsupported_layouts_are_rejected(rows: NativeRows) -> None:
    pool, key, slots = poisoned_pool(1), torch.randn(3, 2, 32), torch.arange(3)
    for value in (key.bfloat16(), key[:2], key.transpose(0, 1)):
        with pytest.raises(ValueError, match=r"^value: "):
            rows.write_kv(key, value, slots, pool, 1)
    with pytest.raises(ValueError, match=r"^key: "):
        rows.write_kv(torch.randn(3, 4, 32)[:, ::2], key, slots, pool, 1)
    with pytest.raises(ValueError, match=r"^slots: "):
        rows.write_kv(key, key, slots.int(), pool, 1)
    with pytest.raises(ValueError, match=r"^max_magnitudes: "):
        rows.write_kv(key, key, slots, pool, 1, torch.zeros(2, 3).mT)


def test_strided_heads_are_reported(rows: NativeRows) -> None:
    whole = torch.randn(3, 4, 32)
    assert has_adjacent_heads(whole[:, 1:3])
    assert has_adjacent_heads(whole[:, ::4]), "one head has no next one"
    assert not has_adjacent_heads(whole[:, ::2])
    assert not has_adjacent_heads(whole[..., :16])
    assert not has_adjacent_heads(whole.transpose(1, 2))


def test_an_address_points_to_the_first_element() -> None:
    whole = torch.zeros(4, 3)
    assert address_of("rows", whole[1:], torch.float32, (3, 3)) == whole.data_ptr() + 12


@pytest.mark.parametrize(
    ("tensor", "got"),
    [
        (torch.zeros(2, 3).half(), "a contiguous one of shape (2, 3) in torch.float16"),
        (torch.zeros(2, 4), "a contiguous one of shape (2, 4) in torch.float32"),
        (torch.zeros(3, 2).mT, "a strided one of shape (2, 3) in torch.float32"),
    ],
)
def test_unexpected_tensors_are_described_in_the_error(tensor: torch.Tensor, got: str) -> None:
    with pytest.raises(ValueError) as refusal:
        address_of("rows", tensor, torch.float32, (2, 3))
    assert str(refusal.value) == f"rows: expected a contiguous tensor of shape (2, 3) in torch.float32, got {got}"
