from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch

from radixkv.kernels.cpu.gemm_backends import QUANTIZED_BITS
from radixkv.kernels.cpu.gemm_trial import GemmChoice
from radixkv.kernels.cpu.stopwatch import Stopwatch
from radixkv.model.layers.gemm_tuner import GemmTuner, TrialBudget, _machine_digest
from tests.processor import skip_without_kernels_for

WEIGHT = torch.empty(8, 16)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all trials. A fake of `choose_gemm` makes the same choice in each."""
    tried: list[tuple[int, ...]] = []

    def choose(weight: torch.Tensor, *_: object, is_exact: bool, **__: object) -> GemmChoice:
        tried.append(tuple(weight.shape))
        return GemmChoice("plain", ((2, 1.5e-6), (512, 2e-3)) if is_exact else ())

    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.choose_gemm", choose)
    return tried


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_shape_is_tried_once_on_a_machine(tmp_path: Path, trials: list[tuple[int, ...]], *, is_exact: bool) -> None:
    tuner = GemmTuner(is_exact=is_exact, directory=tmp_path / "cache")
    first = tuner.choose(WEIGHT, None)
    assert tuner.choose(WEIGHT.clone(), None) == first
    assert GemmTuner(is_exact=is_exact, directory=tmp_path / "cache").choose(WEIGHT, None) == first
    assert trials == [(8, 16)]


def test_the_log_announces_trials_before_the_first_one(
    tmp_path: Path, trials: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="radixkv"):
        for _ in range(2):
            tuner = GemmTuner(is_exact=True, directory=tmp_path)
            tuner.choose(WEIGHT, None)
            tuner.choose(torch.empty(16, 8), None)
    first, *tried = [record.getMessage() for record in caplog.records]
    assert (
        first == f"choosing a matmul for each shape of weight, which {tmp_path / 'gemms.json'} keeps for later starts"
    )
    assert [message.split(" in ")[0] for message in tried] == [
        "tried matmuls with 8 by 16 weights",
        "tried matmuls with 16 by 8 weights",
    ]


def test_shapes_share_a_budget_and_get_the_time_that_others_did_not_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: list[float] = []
    now_s = [0.0]

    def choose(*_: object, limit_s: float, **__: object) -> GemmChoice:
        limits_s.append(limit_s)
        now_s[0] += 0.5
        return GemmChoice("native")

    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.choose_gemm", choose)
    monkeypatch.setattr(Stopwatch, "here", lambda: Stopwatch(lambda: now_s[0]))
    reports: list[str] = []
    budget = TrialBudget(4.0, reports.append)
    first, second = (GemmTuner(is_exact=is_exact, directory=tmp_path, budget=budget) for is_exact in (True, False))
    first.choose(torch.empty(64, 8), None, ("native",), share=0.5)
    second.choose(torch.empty(16, 8), None, ("native",), share=0.25)
    first.choose(torch.empty(24, 8), None, ("native",), share=0.0)
    # Each trial takes 0.5 s. So the second one gets the 1.5 s that the first did not use, and 0.25 * 4 s.
    assert limits_s == [2.0, 2.5, 2.0]
    for _ in range(5):
        budget.spend(0.5)
    first.choose(torch.empty(32, 8), None, ("native",), share=0.125)
    assert limits_s[3] == 0.5, "a trial that exceeds its limit does not shorten those of other shapes"
    assert reports[0] == "trying matmuls with 64 by 8 weights in float32"


def test_without_a_budget_there_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits_s: list[float] = []

    def choose(*_: object, limit_s: float, **__: object) -> GemmChoice:
        limits_s.append(limit_s)
        return GemmChoice("native")

    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.choose_gemm", choose)
    GemmTuner(is_exact=True, directory=tmp_path).choose(WEIGHT, None, ("native",), share=0.0)
    assert limits_s == [math.inf]


def test_processes_that_start_concurrently_make_the_same_choice(
    tmp_path: Path, trials: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (GemmTuner(is_exact=True, directory=tmp_path) for _ in range(2))
    first = one.choose(WEIGHT, None)
    later = GemmChoice("plain", ((2, 9e-6),))
    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.choose_gemm", lambda *_, **__: later)
    assert two.choose(WEIGHT, None) == first != later
    assert two.choose(torch.empty(16, 8), None) == later
    assert GemmTuner(is_exact=True, directory=tmp_path).choose(torch.empty(16, 8), None) == later


def test_a_change_that_affects_the_summation_order_leads_to_a_new_trial(
    tmp_path: Path, trials: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_exact: bool = True, **more: int) -> int:
        GemmTuner(is_exact=is_exact, directory=tmp_path).choose(weight, bias, **more)  # type: ignore[arg-type]
        return len(trials)

    assert choose(WEIGHT) == 1
    assert choose(WEIGHT.bfloat16()) == 2
    assert choose(torch.empty(16, 8)) == 3
    assert choose(torch.empty(16, 8).t()) == 4
    assert choose(WEIGHT, torch.empty(8)) == 5
    assert choose(WEIGHT, is_exact=False) == 6
    assert choose(WEIGHT, max_rows=64) == 7
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert choose(WEIGHT) == 8
    monkeypatch.setattr("radixkv.model.layers.gemm_tuner._machine_digest", lambda: "another")
    assert choose(WEIGHT) == 9
    assert choose(WEIGHT) == 9


def test_choices_of_older_sources_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = _machine_digest.__wrapped__()
    assert _machine_digest.__wrapped__() == digest
    monkeypatch.setattr("radixkv.kernels.native.compiler.sources", lambda: ["of another version"])
    assert _machine_digest.__wrapped__() != digest


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\x00" * 10, "[" * 100_000, " " * 2**21])
def test_an_unreadable_file_is_replaced(
    text: str, tmp_path: Path, trials: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gemms.json"
    file.write_text(text, encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="radixkv"):
        GemmTuner(is_exact=True, directory=tmp_path).choose(WEIGHT, None)
    assert f"{file} can't be read" in caplog.text
    GemmTuner(is_exact=True, directory=tmp_path).choose(WEIGHT, None)
    assert len(trials) == 1


@pytest.mark.parametrize(
    "entry",
    [
        None,
        7,
        {},
        {"backend": "nonsense", "costs": [[2, 1e-6]]},
        {"backend": "plain", "costs": []},  # in exact mode, at least one row count has a cost
        {"backend": "plain", "costs": [[3, 1e-6]]},
        {"backend": "plain", "costs": [[2, -1.0]]},
        {"backend": "plain", "costs": [[2, "x"]]},
        {"backend": "plain", "costs": [[2, math.inf]]},
        {"backend": "plain", "costs": [[2, 10**400]]},
        {"backend": "plain", "costs": [[math.inf, 1e-6]]},
        {"backend": ["plain"], "costs": 3},
        {"backend": "native", "costs": [[2, 1e-6]]},  # a batch-invariant backend has no costs
    ],
)
def test_an_entry_that_we_did_not_write_is_tried_again(
    entry: object, tmp_path: Path, trials: list[tuple[int, ...]]
) -> None:
    GemmTuner(is_exact=True, directory=tmp_path).choose(WEIGHT, None)
    file = tmp_path / "gemms.json"
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), entry)))
    choice = GemmTuner(is_exact=True, directory=tmp_path).choose(WEIGHT, None)
    assert choice == GemmChoice("plain", ((2, 1.5e-6), (512, 2e-3)))
    assert len(trials) == 2


def test_a_choice_for_any_row_count_is_stored_without_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = iter([GemmChoice("native")])
    monkeypatch.setattr("radixkv.model.layers.gemm_tuner.choose_gemm", lambda *_, **__: next(choices))
    for _ in range(2):
        choice = GemmTuner(is_exact=True, directory=tmp_path).choose(WEIGHT, None, ("native", "plain"))
        assert choice == GemmChoice("native")


def test_a_directory_that_cannot_be_written_costs_a_trial_and_nothing_else(
    tmp_path: Path, trials: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for count in (1, 2):
        with caplog.at_level(logging.INFO, logger="radixkv"):
            assert GemmTuner(is_exact=True, directory=tmp_path / "file").choose(WEIGHT, None) is not None
        assert len(trials) == count
    assert "can't be written" in caplog.text


def test_the_file_is_where_caches_are(
    tmp_path: Path, trials: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    GemmTuner(is_exact=True).choose(WEIGHT, None)
    assert {file.name for file in (tmp_path / "radixkv").iterdir()} == {"gemms.json", "gemms.lock"}


def test_int8_weights_are_quantized_in_fast_mode_as_well(tmp_path: Path) -> None:
    for is_exact in (True, False):
        choice = GemmTuner(is_exact=is_exact, weights="int8", directory=tmp_path).choose(WEIGHT, None)
        assert choice is not None
        assert choice.backend == "int8"
        assert {2, 512} <= set(dict(choice.costs))
    assert len(json.loads((tmp_path / "gemms.json").read_text())) == 1


def test_groups_of_weights_are_quantized_without_a_trial_where_they_can_be(tmp_path: Path) -> None:
    skip_without_kernels_for("q4")
    for is_exact in (True, False):
        tuner = GemmTuner(is_exact=is_exact, weights="q4", directory=tmp_path)
        assert tuner.choose(torch.empty(16, 64), None) == GemmChoice("q4")
        assert tuner.choose(torch.empty(16, 64), None, is_head=True) == GemmChoice("q8")
        assert not list(tmp_path.iterdir())
    odd = tuner.choose(torch.empty(16, 33), None)
    assert odd is not None
    assert odd.backend not in QUANTIZED_BITS
