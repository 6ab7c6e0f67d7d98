"""A dry run of the product part completes, and each stage fails if an answer is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.gpu.__main__ import ROOT, main
from bench.gpu.parts import PARTS
from bench.gpu.product.bits import BitsCase, describe_difference
from bench.gpu.product.decode import TimedGeneration, count_different, summarize
from bench.gpu.product.oom import SMALLER_STEP, relative_error
from bench.gpu.product.product_server import ProductServer
from bench.gpu.product.replay import judge_replay
from bench.gpu.product.stage_report import StageReport
from bench.gpu.product.start import CAPTURED_STEPS, DROPPED_STEP, read_start
from bench.gpu.product.tiers import judge_loads
from radixkv.v1.prefill_pb2 import PrefillResponse, Usage


@pytest.mark.timeout(3600)
@pytest.mark.long
def test_every_stage_runs_dry_without_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--part", "product", "--dry-run", "--seconds", "500", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "product.json").read_text(encoding="utf-8"))
    stages = report["stages"]
    outputs_of_failures = {name: each["output"][-2000:] for name, each in stages.items() if each["outcome"] != "ran"}
    assert list(stages) == [each.name for each in PARTS["product"]]
    assert outputs_of_failures == {}
    wrong = [row for each in stages.values() for row in each["result"]["rows"] if not row["is_right"]]
    assert wrong == []
    assert report["is_finished"]
    assert status == 0
    num_rows = {name: len(each["result"]["rows"]) for name, each in stages.items()}
    assert num_rows == {
        "warm": 4,
        "start": 2,
        "bits": 3,
        "tiers": 5,
        "quiet": 4,
        "replay": 4,
        "decode": 6,
        "headline": 2,
        "attention": 7,
        "oom": 3,
        "gpu_tests": 1,
    }
    printed = capsys.readouterr().out
    assert len(printed) < 12_000
    table = printed.rpartition("\n\n")[2].splitlines()
    assert [line.split()[0] for line in table] == ["stage", *num_rows]
    assert len(table) <= 25


def response(logits: tuple[float, ...], token: int = 0, cached: int = 0) -> PrefillResponse:
    logits_bytes = np.array(logits, dtype="<f4").tobytes()
    return PrefillResponse(logits=logits_bytes, next_token_id=token, usage=Usage(cached_tokens=cached))


def test_an_exception_is_the_reason_of_a_row_and_fails_the_stage(tmp_path: Path) -> None:
    report = StageReport(tmp_path / "rows.json", is_dry_run=False)
    with report.row("right") as row:
        row["is_goal_met"] = report.goal(False)
    with report.row("broken"):
        raise RuntimeError("server E is not running\nmore")
    assert report.finish("") == 1
    right, broken = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert (right["is_right"], right["is_goal_met"]) == (True, False)
    assert (broken["is_right"], broken["reason"]) == (False, "RuntimeError: server E is not running")


def test_the_reason_of_a_server_that_does_not_start_has_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("server_E.out").touch()
    Path("server_E.log").write_text(f"{'x' * 1000}\nout of memory\n", encoding="utf-8")
    report = StageReport(tmp_path / "rows.json", is_dry_run=False)
    with report.row("server E"):
        ProductServer("E", pid=-1, address="", metrics_url="", start_time=0.0).wait_until_listening(0.0)
    [row] = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert row["reason"].startswith("RuntimeError: the server ended before it listened: xxx")
    assert row["reason"].endswith("x | out of memory")


def test_a_stage_without_rows_fails_and_a_missed_target_does_not() -> None:
    assert StageReport(None, is_dry_run=True).finish("") == 1
    report = StageReport(None, is_dry_run=False)
    report.add({"name": "slow", "is_right": True, "is_goal_met": False, "text": ""})
    assert report.finish("") == 0


def test_a_single_bit_is_a_difference() -> None:
    below = float(np.nextafter(np.float32(2), np.float32(1)))
    assert describe_difference(response((1, 2, 3)), response((1, 2, 3))) == ""
    assert describe_difference(response((1, 2, 3)), response((1, below, 3))) == "logit 1 differs"
    assert describe_difference(response((1, 2)), response((1, 2), token=1)) == "expected token 0, got 1"
    assert "expected 8 bytes of logits, got 0" in describe_difference(response((1, 2)), PrefillResponse())
    assert describe_difference(PrefillResponse(), PrefillResponse()) != "", (
        "a response without logits is not evidence of equality"
    )


def test_a_response_that_reused_another_number_of_tokens_is_wrong() -> None:
    case = BitsCase(np.arange(8, dtype=np.uint32), 5, "tenant", uncached=response((1, 2)))
    assert case.difference(response((1, 2), cached=5)) == ""
    assert case.difference(response((1, 2), cached=4)) == "expected 5 cached tokens, got 4"


@pytest.mark.parametrize(
    ("loaded", "computed", "difference", "is_right"),
    [(2, 0, None, True), (0, 7, None, True), (0, 0, None, False), (2, 0, "logit 3 differs", False)],
)
def test_a_tier_must_load_or_prefer_to_compute_and_change_no_bit(
    loaded: int, computed: int, difference: str | None, is_right: bool
) -> None:
    row = {"asked": 4, "loaded": loaded, "computed_blocks": computed, "first_difference": difference, "is_right": True}
    judge_loads(row)
    assert row["is_right"] is is_right


@pytest.mark.parametrize(
    ("errors", "different", "is_exact", "is_right"),
    [(0, 0, True, True), (0, 3, False, True), (0, 1, True, False), (1, 0, False, False)],
)
def test_a_replay_fails_by_errors_and_on_the_exact_server_by_other_answers(
    errors: int, different: int, is_exact: bool, is_right: bool
) -> None:
    result = {
        "requests": 10,
        "wall_s": 2.0,
        "errors": errors,
        "without_cache": {"errors": 0},
        "answers": {"different": different},
        "ttft_ms": {"p50": 1.0},
        "token_hit_rate": 0.9,
        "speedup": {"ttft_p50": 9.0},
    }
    row: dict[str, object] = {}
    judge_replay(row, result, is_exact=is_exact)
    assert row["is_right"] is is_right
    assert row["requests_per_s"] == 5


def test_a_request_that_gets_other_tokens_next_to_other_requests_is_counted() -> None:
    prompts = [np.array([number], dtype=np.uint32) for number in range(2)]
    first, different = TimedGeneration((1, 2), (0.0, 1.0)), TimedGeneration((1, 3), (0.0, 1.0))
    tokens_by_prompt: dict[bytes, tuple[int, ...]] = {}
    assert count_different(tokens_by_prompt, prompts, [first, first]) == 0
    assert count_different(tokens_by_prompt, prompts, [first, different]) == 1


def test_the_time_of_a_step_is_the_time_between_two_tokens() -> None:
    generations = [TimedGeneration((1, 2, 3), (0.0, 0.5, 1.0)), TimedGeneration((1, 2, 3), (0.0, 1.0))]
    row = summarize(generations, weights_ms=250.0)
    assert row == {"tokens_per_s": 6.0, "step_ms": 500.0, "weights_ratio": 2.0}


def test_logits_that_are_not_finite_are_wrong() -> None:
    assert relative_error(response((3, 4)), response((3, 4))) == 0
    assert relative_error(response((3, 4)), response((3, float("nan")))) == 1


def test_the_log_of_a_start_is_read_by_its_captured_and_dropped_steps() -> None:
    log = [
        (1.0, "compiled kernels, captured and checked 19 steps as CUDA graphs in 3.0 s"),
        (2.0, "a captured step is not used, because its results differ: shape"),
        (9.5, "ready after 9.4 s: model m on cuda in bfloat16, exact mode, warp-specialized attention"),
    ]
    facts = read_start(log)
    assert (facts["captured_steps"], facts["dropped_steps"], facts["listening_s"]) == (19, 1, 9.5)
    assert str(facts["ready"]).startswith("model m on cuda")


@pytest.mark.parametrize(
    "message", [CAPTURED_STEPS.pattern.replace(r"(\d+)", "%d"), DROPPED_STEP.pattern, SMALLER_STEP]
)
def test_the_service_logs_these_messages(message: str) -> None:
    sources = (ROOT / "radixkv").rglob("*.py")
    assert any(message in source.read_text(encoding="utf-8") for source in sources), (
        "adapt the stage to the new message"
    )
