import json
import re

import pytest

from radixkv.service.cli.main import main

FIELDS = (
    "routing policy replicas capacity_tokens tokens_per_s block_size requests prompt_tokens cached_tokens "
    "token_hit_rate evicted_tokens load_spread busy ttft_p50_s ttft_p99_s new_homes seconds single_cache_hit_rate "
    "share_of_single_cache"
)


@pytest.fixture
def trace(tmp_path):
    """Twelve conversations of four turns; each turn is three blocks longer."""
    path = tmp_path / "chat.jsonl"
    lines = []
    for turn in range(4):
        num_blocks = 3 * (turn + 1)
        for conversation in range(12):
            request = {
                "timestamp": 1000 * (12 * turn + conversation),
                "output_length": 5,
                "input_length": 512 * num_blocks,
                "hash_ids": [100 * conversation + index for index in range(num_blocks)],
            }
            lines.append(json.dumps(request) + "\n")
    path.write_text("".join(lines))
    return str(path)


def test_simulate_compares_routings_with_one_cache(capsys, trace):
    options = ["--capacity-tokens", "64k", "--replicas", "3", "--routing", "prefix,round-robin", "--policy", "lru"]
    assert main(["simulate", trace, *options, "--tokens-per-s", "10k", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert all(list(each) == FIELDS.split() for each in results)
    prefix, round_robin = results
    assert (prefix["routing"], round_robin["routing"]) == ("prefix", "round-robin")
    assert (prefix["replicas"], prefix["capacity_tokens"], prefix["tokens_per_s"]) == (3, 64_000, 10_000)
    assert prefix["share_of_single_cache"] == prefix["token_hit_rate"] / prefix["single_cache_hit_rate"] == 1.0
    # Three servers divide twelve conversations evenly, so each returns in turn to the server that has its prefix.
    assert round_robin["share_of_single_cache"] == 1.0


def test_simulate_prints_a_table_of_fleets(capsys, trace):
    options = ["--capacity-tokens", "64k", "--replicas", "5", "--routing", "prefix,round-robin"]
    assert main(["simulate", trace, *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("48 requests, 184,320 prompt tokens, blocks of 512, 20000 tokens/s per server\n")
    assert re.search(r"^prefix +adaptive +5 x 64,000 +0\.\d{4} +0\.\d{4} +1\.000 ", out, re.MULTILINE)
    assert re.search(r"^round-robin +adaptive +5 x 64,000 +0\.\d{4} +0\.\d{4} +0\.[0-8]\d\d ", out, re.MULTILINE)


def test_the_share_of_a_single_cache_is_1_if_neither_has_a_hit(capsys, trace):
    assert main(["simulate", trace, "--capacity-tokens", "64k", "--replicas", "2", "--limit", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["share_of_single_cache"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--routing", "prefix"], "--routing: requires --replicas"),
        (["--tokens-per-s", "9"], "--tokens-per-s: requires --replicas"),
        (["--replicas", "2", "--tier", "host=1k"], "--tier: can't be combined with --replicas"),
        (["--replicas", "2", "--plot", "x.png"], "--plot: can't be combined with --replicas"),
        (["--replicas", "2", "--hints", "stop"], "--hints: can't be combined with --replicas"),
        (["--replicas", "2", "--time-model", "x.json"], "--time-model: can't be combined with --replicas"),
        (["--replicas", "2000"], "--replicas: expected at most 1024, got 2000"),
        (["--replicas", "2", "--routing", "sideways"], "routing: expected one of prefix, "),
        (["--replicas", "2", "--policy", "optimal"], "policy: expected one that replicas can have, got optimal"),
    ],
)
def test_options_that_do_not_apply_to_a_fleet_are_refused(capsys, trace, options, message):
    assert main(["simulate", trace, "--capacity-tokens", "64k", *options]) == 2
    assert message in capsys.readouterr().err
