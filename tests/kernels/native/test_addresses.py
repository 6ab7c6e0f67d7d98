"""Tensors with other dtypes or layouts than C++ expects are refused, with the name of the argument."""

import pytest
import torch

from radixkv.kernels.native.addresses import address_of


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
