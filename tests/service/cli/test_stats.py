import json
import re
from types import SimpleNamespace

import pytest

from radixkv.service.cli.main import main
from radixkv.service.cli.stats import stats_table
from radixkv.v1.cache_pb2 import (
    BlockStats,
    PartStats,
    RequestStats,
    StateStats,
    StatsResponse,
    TenantStats,
    TierStats,
    TokenStats,
)
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


def test_a_stats_table_shows_every_number():
    stats = StatsResponse(
        model="m",
        device="d",
        uptime_s=101.0,
        block_size=102,
        blocks=BlockStats(
            total=103, free=104, leased=105, published=106, pinned=107, retained=117, retainable=118, on_probation=123
        ),
        requests=RequestStats(waiting=108, running=109, following=122, finished=110, failed=111, cancelled=112),
        tokens=TokenStats(prompt=400, cached=114, computed=115, written=116),
        namespaces=117,
        segments=118,
        held_leases=119,
        evicted_blocks=120,
        evicted_probation_blocks=124,
        block_bytes=121,
        kv_dtype="k8v4",
        model_fingerprint="0a1b2c",
    )
    table = stats_table(stats)
    assert "0a1b2c" in table
    for number in (*range(101, 113), 400, *range(114, 125)):  # all numbers above
        assert str(number) in table, number
    assert "(28.5 %)" in table  # 114 of 400 prompt tokens are cached
    assert "121 bytes each, k8v4" in table


def test_a_stats_table_shows_snapshots_where_there_are_states():
    stats = StatsResponse(requests=RequestStats())
    assert "snapshots" not in stats_table(stats)
    stats.states.CopyFrom(StateStats(snapshots=301, max_snapshots=302, given_up_snapshots=303, recomputed_tokens=304))
    table = stats_table(stats)
    assert "301 of at most 302" in table
    for number in (303, 304):
        assert str(number) in table, number


def test_a_stats_table_shows_parts_where_windowed_layers_have_a_pool():
    stats = StatsResponse(requests=RequestStats())
    assert "windowed" not in stats_table(stats)
    stats.parts.CopyFrom(PartStats(free=301, needed=302, kept=303, given_up=304, shortened_hits=305, lost_tokens=306))
    table = stats_table(stats)
    assert "302 needed, 303 kept, 301 free" in table
    assert "305, by 306 tokens" in table
    assert "304" in table


def test_a_stats_table_shows_each_tier_and_whether_it_works():
    stats = StatsResponse()
    stats.tiers.add(tier="host", is_working=True, blocks=201, used_bytes=202, loaded_blocks=203, missed_blocks=204)
    stats.tiers.add(tier="disk", saved_blocks=205)
    host, disk = (line for line in stats_table(stats).splitlines() if line.startswith("tier "))
    assert host.split(maxsplit=2)[2] == "201 blocks, 202 bytes; 203 loaded, 204 missed, 0 saved"
    assert disk.endswith("205 saved, disabled")


def test_a_name_cannot_control_the_terminal():
    stats = StatsResponse()
    stats.tenants.add(tenant="a\x1b[2J\nb")
    stats.tenants.add(tenant="Zoë")
    *_, first, second = stats_table(stats).splitlines()
    assert first.startswith(r"tenant a\x1b[2J\nb ")
    assert second.startswith("tenant Zoë ")


def test_a_table_of_zeros_does_not_divide_by_zero():
    assert "%" not in stats_table(StatsResponse())


def test_a_stats_table_shows_the_tiers_below_the_device():
    tiers = [TierStats(tier="host", is_working=True, blocks=4, used_bytes=5), TierStats(tier="redis", loaded_blocks=6)]
    tenant = TenantStats(tenant="acme", cached_blocks=3, stored_blocks={"host": 4, "redis": 0})
    table = stats_table(StatsResponse(tiers=tiers, tenants=[tenant]))
    assert "4 blocks, 5 bytes; 0 loaded" in table
    assert "6 loaded, 0 missed, 0 saved, disabled" in table
    assert "3 blocks, 4 in host, 0 cached tokens" in table
