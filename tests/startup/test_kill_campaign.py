"""After an engine is killed, the next one starts on its disk, and its answers are bitwise identical."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.api.caller import Caller
from tests.patience import PATIENCE_S
from tests.startup.kill_campaign import Campaign, Life
from tests.startup.life import Case

ROOT_FOLDER = Path(__file__).parents[2]


@pytest.mark.long
def test_restarts_after_kills_answer_as_if_nothing_was_cached(tmp_path: Path) -> None:
    report_file = tmp_path / "kills.json"
    command = [sys.executable, "-m", "tests.startup.kill_campaign", "--kills", "3", "--json", str(report_file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT_FOLDER, env=environment, check=True, timeout=3 * PATIENCE_S, capture_output=True)
    report = json.loads(report_file.read_text())
    assert report["num_kills"] == sum(report["kills"].values()) == 3
    assert report["different"] == report["failed_lives"] == 0
    assert report["restarts_after_a_kill_that_served"] > 0
    assert report["answers_with_disk_blocks"] > 0


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    campaign = Campaign(tmp_path, seed=1)
    campaign.cases = [Case(Caller(), tokens=b"", sampling=None, digest="right")]
    return campaign


def end_life(campaign: Campaign, *lines: str, moment: str = "", status: int = 0) -> None:
    """Let a life report these lines and those of a whole life, and end."""
    life = Life(0.0, moment)
    for line in (*lines, "opened", "found 0 0", "ready", "served", "checked", "stopped"):
        campaign.note(life, line.split())
    campaign.end(life, status)


def test_a_wrong_answer_is_detected(campaign: Campaign) -> None:
    end_life(campaign, "answer 0 right 0 16")
    assert campaign.report.is_good
    end_life(campaign, "answer 0 wrong 0 16")
    assert (campaign.report.answers, campaign.report.different) == (2, 1)
    assert not campaign.report.is_good


def test_an_unused_disk_is_detected(campaign: Campaign) -> None:
    end_life(campaign, "answer 0 right 16 0")
    assert not campaign.report.is_good


@pytest.mark.parametrize("status", [1, -signal.SIGSEGV, -signal.SIGKILL])
def test_a_failing_life_is_detected(campaign: Campaign, status: int) -> None:
    end_life(campaign, "answer 0 right 0 16", status=status)
    assert campaign.report.failed_lives == 1
    assert not campaign.report.is_good


def test_only_planned_kills_and_the_lives_after_them_are_counted(campaign: Campaign) -> None:
    end_life(campaign, moment="stop", status=-signal.SIGKILL)
    end_life(campaign, "answer 0 right 0 16", moment="stop")
    end_life(campaign, "answer 0 right 0 16")
    assert campaign.report.kills == {"stop": 1}
    assert campaign.report.whole_lives == 2
    assert campaign.report.restarts_after_a_kill_that_served == 1


def test_purged_callers_are_verified_by_later_lives(campaign: Campaign) -> None:
    end_life(campaign, "purged 0", "purged 2")
    assert campaign.purged == {0, 2}
    end_life(campaign, "verified 2")
    assert campaign.purged == {0}
