import json
import re
from types import SimpleNamespace

import pytest

from radixkv.service.cli.main import main
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine


def test_stats_print_a_table_or_json(capsys):
    code, out, _ = run_cli(capsys, FakeEngine(), "stats")
    assert code == 0
    assert re.search(r"^model +fake on cpu$", out, re.MULTILINE)
    stats = json.loads(run_cli(capsys, FakeEngine(), "stats", "--json")[1])
    assert stats["blocks"] == {
        "total": 10,
        "free": 5,
        "leased": 2,
        "published": 3,
        "pinned": 1,
        "retained": 2,
        "retainable": 4,
        "on_probation": 3,
        "withheld": 0,
    }
    assert stats["evicted_blocks"] == 2**53 + 1


class FakeSleep:
    """Ends a watch as Ctrl-C does, in its third pause."""

    def __init__(self):
        self.pauses_s = []

    def __call__(self, pause_s):
        self.pauses_s.append(pause_s)
        if len(self.pauses_s) == 3:
            raise KeyboardInterrupt


@pytest.fixture
def pauses_s(monkeypatch):
    sleep = FakeSleep()
    monkeypatch.setattr("radixkv.service.cli.stats.time", SimpleNamespace(sleep=sleep))
    return sleep.pauses_s


def test_a_watch_prints_a_table_for_each_refresh_where_there_is_no_terminal(capsys, pauses_s):
    code, out, err = run_cli(capsys, FakeEngine(), "stats", "--watch")
    assert (code, err, pauses_s) == (0, "", [2.0] * 3)
    tables = out.removesuffix("\n\n").split("\n\n")
    assert len(tables) == 3
    assert all(table.startswith("model ") for table in tables)
    assert "\x1b" not in out


def test_a_watch_redraws_a_terminal_and_fits_into_it(capsys, monkeypatch, pauses_s):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("LINES", "5")
    code, out, _ = run_cli(capsys, FakeEngine(), "stats", "--watch", "0.5")
    assert (code, pauses_s) == (0, [0.5] * 3)
    screens = out.split("\x1b[H\x1b[J")
    assert screens[0] == ""
    assert [screen.count("\n") for screen in screens[1:]] == [4, 4, 4]


def test_a_watch_as_json_prints_one_object_per_line(capsys, pauses_s):
    out = run_cli(capsys, FakeEngine(), "stats", "--watch", "--json")[1]
    assert [json.loads(line)["model"] for line in out.splitlines()] == ["fake"] * 3


def test_a_watch_ends_when_the_service_does(capsys):
    assert main(["stats", "--watch", "--address", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    assert capsys.readouterr().err.startswith("radixkv: UNAVAILABLE: ")


def test_a_tenant_sees_only_the_statistics_that_it_may_see(capsys):
    code, out, _ = run_cli(capsys, FakeEngine(), "stats", "--tenant", "a")
    assert code == 0
    assert re.search(r"^tenant a +3 blocks", out, re.MULTILINE)
    assert "prompt tokens" not in out
    assert "tenant b" not in out
