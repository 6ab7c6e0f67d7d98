"""A checkpoint is written with llama.cpp's tensor names and row order."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.parts.peers import checkpoint
from bench.parts.peers.gguf_file import gguf_name, interleave, main, vocabulary


class FakeWriter:
    """Imitates the writer of the package gguf: records fields and tensors instead of writing them."""

    fields: dict[str, Any]
    tensors: dict[str, Any]

    def __init__(self, file: str, kind: str) -> None:
        FakeWriter.fields, FakeWriter.tensors = {"file": file, "kind": kind}, {}

    def __getattr__(self, name: str) -> Any:
        return lambda *values: FakeWriter.fields.__setitem__(name, values)

    def add_tensor(self, name: str, weight: Any, raw_dtype: Any = None) -> None:
        FakeWriter.tensors[name] = (weight, raw_dtype)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", None), ("bfloat16", "BF16")])
def test_every_weight_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str | None) -> None:
    kinds = SimpleNamespace(BF16="BF16", F32="F32")
    files = SimpleNamespace(MOSTLY_BF16=32, ALL_F32=0)
    quants = SimpleNamespace(quantize=lambda weight, _: weight)
    gguf = SimpleNamespace(GGMLQuantizationType=kinds, GGUFWriter=FakeWriter, LlamaFileType=files, quants=quants)
    monkeypatch.setitem(sys.modules, "gguf", gguf)
    checkpoint.main("tiny", "float32", str(tmp_path))
    main(str(tmp_path), dtype, "out.gguf")
    weights = checkpoint.build("tiny", "float32").state_dict()
    assert sorted(FakeWriter.tensors) == sorted(gguf_name(name) for name in weights if name != "lm_head.weight"), (
        "the head is the embedding"
    )
    assert FakeWriter.fields["add_head_count_kv"] == (2,)
    assert len(FakeWriter.fields["add_token_list"][0]) == 512
    value, raw_dtype = FakeWriter.tensors["blk.3.attn_v.weight"]
    assert np.array_equal(value, weights["model.layers.3.self_attn.v_proj.weight"].numpy())
    assert raw_dtype == kind
    assert FakeWriter.tensors["output_norm.weight"][1] is None
    query = FakeWriter.tensors["blk.0.attn_q.weight"][0]
    assert np.array_equal(query, interleave(weights["model.layers.0.self_attn.q_proj.weight"].numpy(), 8))


def test_halves_of_a_head_become_pairs() -> None:
    weight = np.arange(12).reshape(12, 1)
    assert interleave(weight, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_the_vocabulary_has_a_kind_for_each_token() -> None:
    tokens, kinds = vocabulary(300)
    assert len(tokens) == len(set(tokens)) == len(kinds) == 300
    assert (kinds[:4], kinds[299]) == ([2, 3, 3, 1], 1)
