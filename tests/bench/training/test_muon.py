import pytest
import torch

from bench.training.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(32, 32), (64, 16), (16, 64)])
def test_an_update_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(orthogonal(matrix), full_matrices=False)
    assert values.min() > 0.5
    assert values.max() < 1.3
    expected_left, _, expected_right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.dist(left @ right, expected_left @ expected_right) < 0.1


def test_steps_lead_to_the_least_loss() -> None:
    torch.manual_seed(0)
    goal, weight = torch.randn(16, 8), torch.nn.Parameter(torch.zeros(16, 8))
    optimizer = Muon([weight], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        (weight - goal).square().mean().backward()
        optimizer.step()
    assert (weight - goal).square().mean() < 0.1 * goal.square().mean()
