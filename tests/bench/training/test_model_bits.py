import math
from types import SimpleNamespace

import pytest
import torch

from bench.training.model_bits import model_bits


class CountingModel:
    """Predicts the next number with a logit that exceeds the others by `surplus`; records the lengths of windows."""

    def __init__(self, surplus: float) -> None:
        self.surplus = surplus
        self.windows: list[int] = []

    def __call__(self, ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        self.windows.append(ids.numel())
        logits = torch.zeros(1, ids.numel(), 64)
        logits[0, torch.arange(ids.numel()), (ids[0] + 1) % 64] = self.surplus
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("num_tokens", [2, 8, 9, 12, 13, 14, 100, 101])
def test_each_token_is_predicted_once(num_tokens: int) -> None:
    ids = torch.arange(num_tokens) % 64
    assert model_bits(CountingModel(0.0), ids, 8) == pytest.approx((num_tokens - 1) * math.log2(64))  # type: ignore[arg-type]
    assert model_bits(CountingModel(50.0), ids, 8) == pytest.approx(0, abs=1e-6)  # type: ignore[arg-type]


def test_a_text_is_read_in_windows() -> None:
    model = CountingModel(0.0)
    model_bits(model, torch.zeros(30, dtype=torch.long), 8)  # type: ignore[arg-type]
    assert max(model.windows) == 8
