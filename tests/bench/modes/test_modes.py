from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.modes.__main__ import main
from bench.modes.traffic import traffics
from radixkv.config import CacheConfig
from tests.free_port import free_port
from tests.offload.tiers.mooncake_master import WHY_NOT, mooncake_master
from tests.offload.tiers.redis_server import SERVER, redis_server

_QUARTER = "a quarter fits"
_SMALL_SIZES = ["--documents", "4", "--rounds", "2", "--document-tokens", "192", "--question-tokens", "9"]


@contextlib.contextmanager
def run_shared_stores(folder: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Run the shared stores that are installed; yield the options with which the command uses them, and their names."""
    options, names = [], []
    with contextlib.ExitStack() as stack:
        if SERVER is not None:
            options += ["--redis", stack.enter_context(redis_server(folder)).url]
            names.append("Redis")
        if WHY_NOT is None:
            options += ["--mooncake", stack.enter_context(mooncake_master(free_port()))]
            names.append("Mooncake")
        yield options, names


@pytest.mark.long
def test_all_modes_give_the_same_answers_and_a_store_reuses_more_than_the_pool_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, picture = tmp_path / "modes.json", tmp_path / "modes.png"
    arguments = ["--traffic", _QUARTER, *_SMALL_SIZES, "--new-tokens", "2"]
    with run_shared_stores(tmp_path) as (options, names):
        assert main([*arguments, *options, "--json", str(table), "--plot", str(picture)]) == 0
    result = json.loads(table.read_text(encoding="utf-8"))
    assert result["command"].startswith("python -m bench.modes --traffic")
    assert {row["traffic"] for row in result["rows"]} == {_QUARTER}
    assert {row["different_answers"] for row in result["rows"]} == {0}
    rates = {row["mode"]: row["hit_rate"] for row in result["rows"]}
    assert len(rates) == 5 + len(names)
    assert rates["no cache"] == rates["K/V within a request"] == 0
    # In the second of two rounds, all 192 tokens of a document, of the 201 tokens of a prompt, are reused.
    max_hit_rate = 192 / (2 * 201)
    assert rates["prefix cache"] < 0.5 * max_hit_rate
    for store in ("host memory", *names):
        assert rates["prefix cache"] < rates[f"prefix cache, {store}"] <= max_hit_rate
    for row in result["rows"]:
        for name in ("ttft", "later_ttft"):
            low_ms, high_ms = row[f"{name}_quartiles_ms"]
            assert 0 < low_ms <= row[f"{name}_ms"] <= high_ms
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "a quarter fits: 4 documents" in capsys.readouterr().out


def test_traffic_asks_about_each_document_in_each_round() -> None:
    fits, quarter, once = traffics(3, 2, 8, 4, 1)
    prompts = list(fits.prompts(100, seed=1))
    assert prompts == list(quarter.prompts(100, seed=1))
    assert len({prompt[:32] for prompt in prompts}) == 3
    assert len(set(prompts)) == len(prompts) == 6
    assert len({prompt[:32] for prompt in once.prompts(100, seed=1)}) == 6


def test_a_pool_must_hold_a_request_and_the_copy_of_a_block() -> None:
    block_size = CacheConfig().block_size
    traffic = traffics(1, 1, 2 * block_size - 10, 9, 1)[0]
    pools = [traffic._replace(pool_tokens=num) for num in (2 * block_size, 3 * block_size - 1, 3 * block_size)]
    assert [each.pool_holds_request for each in pools] == [False, False, True]
