"""Attention over shared blocks is compared with attention over separate blocks."""

from __future__ import annotations

import json

import pytest
import torch

from bench import shared_prefix
from bench.shared_prefix import SharedPrefixCase, measure


@pytest.fixture(autouse=True)
def _restore_num_threads():
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def test_shared_separate_and_fused_attention_are_measured(tmp_path, capsys):
    file = tmp_path / "shared.json"
    options = "--requests 1 3 --prefixes 128 --own 70 --new 1 --heads 6 2 32 --dtypes float32 --rounds 2"
    shared_prefix.main([*options.split(), "--json", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    assert [row["requests"] for row in result["rows"]] == [1, 3]
    assert all(row[name] > 0 for row in result["rows"] for name in ("shared_ms", "apart_ms", "fused_ms"))
    assert "shared / apart" in capsys.readouterr().out


def test_different_bits_end_the_benchmark(monkeypatch):
    case = SharedPrefixCase(2, 128, 70, 1, (6, 2, 32), torch.float32)
    attend = case.attend
    monkeypatch.setattr(case, "attend", lambda *, is_shared: attend(is_shared=is_shared) + is_shared * 1e-7)
    with pytest.raises(SystemExit, match=r"^shared blocks: the bits differ from those with separate blocks"):
        measure(case, rounds=1)


def test_a_wrong_output_ends_the_benchmark(monkeypatch):
    case = SharedPrefixCase(2, 128, 70, 5, (6, 2, 32), torch.float32)
    fused = case.attend_contiguous()
    assert torch.allclose(case.attend(is_shared=True), fused, atol=1e-5)
    monkeypatch.setattr(case, "attend_contiguous", lambda: fused + 1)
    with pytest.raises(SystemExit, match=r"^shared blocks: expected the output of torch's fused attention"):
        measure(case, rounds=1)
