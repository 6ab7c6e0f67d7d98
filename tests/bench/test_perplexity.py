import pytest
import torch

from bench import perplexity
from bench.perplexity import RoundedLinear, round_linears
from radixkv.errors import ConfigError
from radixkv.kernels.cpu.int8_linear import int8_linear, pack_int8
from tests.processor import needs_exact_int8


@pytest.mark.long
def test_fewer_bits_change_predictions_more() -> None:
    rows = {(row["weights"], row["dtype"]): row for row in perplexity.measure("tiny", 1, 40)}
    assert rows["auto", "float32"]["kl"] == 0
    for weights_and_dtype in (("auto", "bfloat16"), ("int8", "float32")):
        assert 0 < rows[weights_and_dtype]["kl"] < 0.1
    if ("q8", "float32") in rows:  # only with compiled kernels
        assert 0 < rows["q8", "float32"]["kl"] < rows["q4", "float32"]["kl"]


def test_a_missing_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"missing\.gguf, which does not exist"):
        next(perplexity.measure("missing.gguf", 1, 40))


def make_linear(bias: bool) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(300, 48, bias=bias).requires_grad_(False)


@needs_exact_int8
@pytest.mark.parametrize("bias", [False, True])
def test_a_rounded_layer_has_the_bits_of_the_served_layer(bias: bool) -> None:
    linear, rows = make_linear(bias), torch.randn(17, 300)
    assert torch.equal(RoundedLinear(linear)(rows), int8_linear(rows, pack_int8(linear.weight), linear.bias))


@pytest.mark.parametrize("bias", [False, True])
def test_rounding_changes_the_output_a_little(bias: bool) -> None:
    linear, rows = make_linear(bias), torch.randn(2, 17, 300)
    errors = RoundedLinear(linear)(rows) - linear(rows)
    assert 0 < errors.std() < 0.02 * linear(rows).std()


def test_a_row_does_not_depend_on_the_others() -> None:
    rounded, rows = RoundedLinear(make_linear(bias=False)), torch.randn(40, 300)
    assert torch.equal(rounded(rows)[7:9], rounded(rows[7:9]))


def test_every_linear_layer_is_replaced() -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(4, 8), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
    round_linears(module)
    assert [type(each).__name__ for each in module.modules()] == [
        *("Sequential", "Embedding", "Sequential", "RoundedLinear", "ReLU"),
    ]
