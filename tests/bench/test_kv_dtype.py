import pytest
import torch

from bench import kv_dtype
from bench.parts.quality import PoolText, load
from radixkv.config import KV_DTYPES


def test_with_fewer_bits_more_tokens_fit_and_predictions_change_more() -> None:
    rows = dict(zip(KV_DTYPES, kv_dtype.measure("tiny", 1, 50), strict=True))
    assert (rows["auto"]["kl"], rows["auto"]["perplexity_change"], rows["auto"]["same_top"]) == (0, 0, 1)
    for better, worse in (("auto", "bf16"), ("bf16", "int8"), ("int8", "k8v4")):
        assert rows[better]["tokens_over_bf16"] < rows[worse]["tokens_over_bf16"]
        assert 0 <= rows[better]["kl"] < rows[worse]["kl"]
    # Bytes of a vector of 32 elements in bf16, and in the other formats, with four bytes for the scale. In k8v4, keys
    # have 36 bytes and values 20.
    assert rows["int8"]["tokens_over_bf16"] == pytest.approx(64 / 36)
    assert rows["k8v4"]["tokens_over_bf16"] == pytest.approx(64 / 28)


def test_a_hit_that_changes_the_answer_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("tiny")
    original_append = PoolText.append
    monkeypatch.setattr(PoolText, "append", lambda self, ids: original_append(self, ids) + ids.numel())
    with pytest.raises(AssertionError, match="int8: a hit changes the answer"):
        kv_dtype.logits_of(model, "int8", torch.arange(40), is_checked=True)
