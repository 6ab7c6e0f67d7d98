import pytest

from bench import perplexity
from radixkv.errors import ConfigError


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
