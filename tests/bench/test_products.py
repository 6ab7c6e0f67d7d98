from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.products import main, measure
from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, gemm_backends
from radixkv.model.on_cpu import native_library
from tests.processor import skip_without_kernels_for


def test_every_library_is_timed_and_the_native_one_is_compared_with_the_best_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "products.json"
    main(["--shapes", "24x40,40x24", "--rows", "1,9", "--dtypes", "float32", "--rounds", "2", "--json", str(file)])
    result = json.loads(file.read_text())
    shapes = [(row["in_features"], row["out_features"], row["rows"]) for row in result["rows"]]
    assert shapes == [(24, 40, 1), (24, 40, 9), (40, 24, 1), (40, 24, 9)]
    for row in result["rows"]:
        assert row["us"].keys() == {*gemm_backends(torch.empty(24, 40)), *row["format_ratios"]}
        assert all(each > 0 for each in row["us"].values())
        libraries = {name: each for name, each in row["us"].items() if name not in row["format_ratios"]}
        others_us = [us for name, us in libraries.items() if name != "native"]
        expected_ratio = row["us"]["native"] / min(others_us) if "native" in row["us"] else None
        assert row["ratio"] == expected_ratio
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_quantized_formats_are_timed_next_to_the_libraries() -> None:
    skip_without_kernels_for("q4")
    native_library()
    (row,) = measure(torch.randn(40, 64), [3], 1)
    assert {"q8", "q4"} <= row["format_ratios"].keys() <= row["us"].keys()
    assert row["format_ratios"]["q4"] > 0


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = GEMM_BACKENDS["plain"]
    monkeypatch.setitem(
        GEMM_BACKENDS, "plain", plain._replace(multiply=lambda *arguments: 1.01 * plain.multiply(*arguments))
    )
    with pytest.raises(AssertionError, match="plain: the result differs"):
        measure(torch.ones(3, 5), [2], 1)
