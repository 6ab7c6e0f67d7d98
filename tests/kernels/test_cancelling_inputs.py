import pytest
import torch

from radixkv.kernels.cancelling_inputs import sensitive_linear


@pytest.mark.parametrize("in_features", [64, 99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_result_is_the_bias_and_another_summation_order_changes_it(dtype: torch.dtype, in_features: int) -> None:
    like = torch.empty(in_features, 40, dtype=dtype).t()
    rows, weight, bias = sensitive_linear(like, torch.empty(40, dtype=dtype), 20)
    assert bias is not None
    assert (weight.shape, weight.stride(), weight.dtype) == (like.shape, like.stride(), dtype)
    assert (rows.shape, rows.dtype, bias.dtype) == ((20, in_features), dtype, dtype)
    assert (rows.double() @ weight.double().t()).abs().max() < 1e-9
    # One term per input feature, `[num_rows, out_features]` each.
    terms = list((rows.float().t()[:, :, None] * weight.float().t()[:, None]).unbind())
    forwards = sum(terms, start=bias.float()).to(dtype)
    backwards = sum(terms[::-1], start=bias.float()).to(dtype)
    assert (forwards != backwards).float().mean() > 0.5


def test_without_a_bias_there_is_none() -> None:
    assert sensitive_linear(torch.empty(3, 8), None, 2)[2] is None
