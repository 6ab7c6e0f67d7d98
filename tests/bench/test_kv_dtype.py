import json
import sys

import pytest
import torch

from bench import kv_dtype
from radixkv.config import KV_DTYPES


def test_fewer_bits_fit_more_tokens_and_move_the_logits_further(tmp_path, monkeypatch, capsys):
    file = tmp_path / "kv_dtype.json"
    arguments = ["--models", "tiny", "--texts", "1", "--tokens", "50", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["kv_dtype", *arguments])
    kv_dtype.main()
    result = json.loads(file.read_text(encoding="utf-8"))
    rows = dict(zip(KV_DTYPES, result["rows"], strict=True))
    assert rows["auto"]["kl"] == rows["auto"]["max_logit_difference"] == 0
    assert rows["auto"]["top1_agreement"] == 1
    for better, worse in (("auto", "bf16"), ("bf16", "int8"), ("int8", "int4")):
        assert rows[better]["tokens_over_bf16"] < rows[worse]["tokens_over_bf16"]
        assert rows[better]["mean_logit_difference"] < rows[worse]["mean_logit_difference"]
        assert 0 <= rows[better]["kl"] < rows[worse]["kl"]
    assert rows["int8"]["tokens_over_bf16"] == pytest.approx(64 / 36)
    assert capsys.readouterr().out.count("tiny") == len(KV_DTYPES)


def test_a_hit_that_changes_the_answer_is_not_measured(monkeypatch):
    model = kv_dtype.build_model("tiny", 1)
    append = kv_dtype.Text.append
    monkeypatch.setattr(kv_dtype.Text, "append", lambda self, ids: append(self, ids) + ids.numel())
    with pytest.raises(AssertionError, match="int8: a hit changes the answer"):
        kv_dtype.logits_of(model, "int8", torch.arange(40))


def test_a_text_is_what_the_model_expects():
    model = kv_dtype.build_model("tiny", 1)
    drawn, noise = kv_dtype.draw_text(model, 60, seed=0), torch.arange(60) % 250
    logits = [kv_dtype.logits_of(model, "auto", ids) for ids in (drawn, noise)]
    drawn_perplexity, noise_perplexity = (
        kv_dtype._perplexity(rows, [ids]) for rows, ids in zip(logits, (drawn, noise), strict=True)
    )
    assert drawn_perplexity < noise_perplexity


@pytest.mark.long
def test_weights_of_8_bits_add_a_row(tmp_path, monkeypatch):
    file = tmp_path / "weights.json"
    arguments = ["--models", "tiny", "--texts", "1", "--tokens", "40", "--weights", "int8", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["kv_dtype", *arguments])
    kv_dtype.main()
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert [row["weights"] for row in rows] == ["auto", "int8", *["auto"] * (len(KV_DTYPES) - 1)]
    own, rounded = rows[:2]
    assert own["kl"] == 0 < rounded["kl"]
    assert rounded["kv_dtype"] == own["kv_dtype"] == "auto (fp32)"
    assert rounded["mean_logit_difference"] < 0.1 * rounded["std_of_logits"]
