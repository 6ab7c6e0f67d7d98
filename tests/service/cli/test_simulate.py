import gzip
import json
import re
from pathlib import Path

import pytest

from radixkv.service.cli.main import main
from tests.service.command_line import usage_error

CHAT = [
    {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]},
    {"timestamp": 900, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]},
    {"timestamp": 1500, "input_length": 1500, "output_length": 5, "hash_ids": [1, 5, 6]},
]


RESULT_FIELDS = (
    "policy capacity_tokens block_size requests prompt_tokens cached_tokens token_hit_rate evicted_tokens seconds"
)


@pytest.fixture
def chat_trace(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in CHAT))
    return str(path)


def test_simulate_prints_json(capsys, chat_trace):
    arguments = ["--capacity-tokens", "3584,0.004096M", "--policy", "lru,adaptive,optimal", "--json"]
    assert main(["simulate", chat_trace, *arguments]) == 0
    out, err = capsys.readouterr()
    results = json.loads(out)
    assert err == ""
    assert [(each["policy"], each["capacity_tokens"]) for each in results] == [
        (policy, capacity) for policy in ("lru", "adaptive", "optimal") for capacity in (3584, 4096)
    ]
    assert all(list(each) == RESULT_FIELDS.split() for each in results)
    # The third request shares the first block of 512 tokens with the first request.
    assert (results[0]["requests"], results[0]["prompt_tokens"], results[0]["cached_tokens"]) == (3, 3100, 512)


def test_simulate_reads_a_compressed_trace(capsys, chat_trace):
    Path(chat_trace + ".gz").write_bytes(gzip.compress(Path(chat_trace).read_bytes()))
    assert main(["simulate", chat_trace + ".gz", "--capacity-tokens", "4k"]) == 0
    assert capsys.readouterr().out.startswith("3 requests, 3,100 prompt tokens")


def test_simulate_reads_other_formats_by_detection_or_by_name(capsys, caplog, tmp_path):
    file = tmp_path / "bailian.jsonl"
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 40, "hash_ids": [1, 2, 3]}
    file.write_text(f"{json.dumps(row)}\n{json.dumps(row | {'hash_ids': [1, 2, 4], 'timestamp': 0.25})}\n")
    cached_tokens = []
    for options in (
        [],
        ["--format", "bailian"],
        ["--format", "mooncake", "--tokens-per-id", "16", "--timestamps", "s"],
    ):
        arguments = ["simulate", str(file), "--capacity-tokens", "1k", "--block-size", "16", "--json", *options]
        assert main(arguments) == 0
        cached_tokens.append(json.loads(capsys.readouterr().out)[0]["cached_tokens"])
    assert cached_tokens == [32, 32, 32]  # the first two blocks of 16
    sorted_line = f"trace {file}: 1 of 2 requests have an earlier timestamp than a request before them; they are sorted"
    assert caplog.messages == [sorted_line] * 3
    assert "'azure'" in usage_error(capsys, "simulate", str(file), "--capacity-tokens", "1k", "--format", "azure")


def test_a_fleet_reads_other_formats_too(capsys, tmp_path):
    file = tmp_path / "weka.json"
    requests = [{"t": time, "type": "n", "in": 130, "out": 1, "hash_ids": [1, 2]} for time in (0, 10)]
    file.write_text(json.dumps({"block_size": 64, "hash_id_scope": "local", "requests": requests}, indent=1))
    assert main(["simulate", str(file), "--capacity-tokens", "64k", "--replicas", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["cached_tokens"] == 128


def test_simulate_names_the_next_step_for_lengths_and_texts(capsys, tmp_path):
    file = tmp_path / "trace"
    for text, step in (
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n", "`radixkv plan` answers questions about lengths"),
        ('[{"conversations": [{"from": "human", "value": "hi"}]}]', "convert it with `radixkv trace"),
    ):
        file.write_text(text)
        assert main(["simulate", str(file), "--capacity-tokens", "64k"]) == 2
        assert step in capsys.readouterr().err


def test_simulate_prints_a_table_and_takes_a_block_size_and_a_limit(capsys, chat_trace):
    options = ["--capacity-tokens", "64k", "--block-size", "64", "--limit", "2"]
    assert main(["simulate", chat_trace, *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 requests, 1,600 prompt tokens, blocks of 64\n")
    assert re.search(r"^adaptive +64,000 +0\.0000 ", out, re.MULTILINE)


def test_a_probation_share_protects_a_reused_block_from_blocks_that_are_used_once(capsys, tmp_path):
    path, ids = tmp_path / "flood.jsonl", [0, 0, 1, 2, 3, 4, 0]
    lines = ({"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [each]} for each in ids)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cached_tokens = []
    for options in ([], ["--probation-share", "0.5"]):  # the capacity is three blocks of 512
        arguments = ["--capacity-tokens", "2k", "--policy", "lru", "--json", *options]
        assert main(["simulate", str(path), *arguments]) == 0
        cached_tokens.append(json.loads(capsys.readouterr().out)[0]["cached_tokens"])
    assert cached_tokens == [511, 2 * 511]  # without the share, block 0 is evicted before its last use


def test_simulate_plots(capsys, chat_trace, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.png"
    arguments = ["--capacity-tokens", "2k,4k", "--policy", "lru", "--plot", str(picture), "--json"]
    assert main(["simulate", chat_trace, *arguments]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {each["policy"] for each in json.loads(capsys.readouterr().out)} == {"lru"}  # the optimum is only drawn


LOOP = [
    {"timestamp": 1000 * index, "input_length": 1024, "output_length": 5, "hash_ids": [first_id, first_id + 1]}
    for index, first_id in enumerate([10, 20, 10, 20])
]
LLAMA_8B = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128"]


@pytest.fixture
def loop_trace(tmp_path):
    path = tmp_path / "loop.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LOOP))
    return str(path)


def test_simulate_with_tiers_shows_hits_and_writes_of_each_tier(capsys, loop_trace):
    arguments = ["--capacity-tokens", "1024", "--tier", "host=512,disk=unbounded", "--policy", "lru,optimal"]
    assert main(["simulate", loop_trace, *arguments, "--json"]) == 0
    with_tiers, optimum = json.loads(capsys.readouterr().out)
    assert list(with_tiers) == [*RESULT_FIELDS.split(), "tiers", "device_tokens", "device_hit_rate"]
    assert (with_tiers["cached_tokens"], with_tiers["device_tokens"], with_tiers["device_hit_rate"]) == (1024, 0, 0)
    assert with_tiers["tiers"] == [
        {
            "tier": "host",
            "capacity_tokens": 512,
            "cached_tokens": 1024,
            "token_hit_rate": 0.25,
            "written_blocks": 6,
            "loaded_blocks": 2,
            "held_blocks": 1,
        },
        {
            "tier": "disk",
            "capacity_tokens": None,
            "cached_tokens": 0,
            "token_hit_rate": 0.0,
            "written_blocks": 4,
            "loaded_blocks": 0,
            "held_blocks": 4,
        },
    ]
    assert list(optimum) == RESULT_FIELDS.split()
    assert (optimum["capacity_tokens"], optimum["cached_tokens"]) == (1024, 2 * 1023)
    assert main(["simulate", loop_trace, *arguments]) == 0
    out = capsys.readouterr().out
    moves = "host written +host loaded +disk written +disk loaded"
    columns = rf"^policy +capacity +hit rate +device +host +disk +cached +evicted +{moves} +time$"
    assert re.search(columns, out, re.MULTILINE)
    assert re.search(r"^lru +1,024 +0\.2500 +0\.0000 +0\.2500 +0\.0000 +1,024 +3,072 +6 +2 +4 +0 ", out, re.MULTILINE)
    assert re.search(r"^optimal +1,024 +0\.4995 +- +- +- +2,046 +0 +- +- +- +- ", out, re.MULTILINE)


SHAPE = ["--layers", "2", "--kv-heads", "1", "--head-dim", "64", "--context", "512"]


def test_simulate_with_a_time_model_shows_times_to_the_first_token(capsys, loop_trace, tmp_path):
    path = tmp_path / "times.json"
    rates = ["--tier", "host=1GB", "--prefill-tokens-per-s", "1000"]
    assert main(["plan", *SHAPE, *rates, "--time-model", str(path)]) == 0
    assert json.loads(path.read_text())["token_s"] == 0.001
    capsys.readouterr()
    arguments = ["simulate", loop_trace, "--capacity-tokens", "1024", "--policy", "lru,optimal", "--tier", "host=512"]
    arguments += ["--time-model", str(path)]
    assert main([*arguments, "--json"]) == 0
    with_times, optimum = json.loads(capsys.readouterr().out)
    assert with_times["latency"]["num_returns"] == 0
    assert with_times["latency"]["ttft_p50_s"] > 0.5
    assert "latency" not in optimum
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"TTFT p50 +p95 +returns +ready +timely +time$", out, re.MULTILINE)
    assert re.search(r"^lru .* 0 +- +- +\d+\.\d s$", out, re.MULTILINE)


def test_simulate_derives_a_time_model_from_the_times_that_the_server_recorded(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"input_length": 100, "hash_ids": [1, 2], "output_length": 0, "ttft_ms": 30.0, "cached_length": 0}
    loaded = line | {"cached_length": 64, "loaded_lengths": {"host": 64}, "ttft_ms": 20.0}
    path.write_text("".join(json.dumps(each) + "\n" for each in (line, loaded)))
    arguments = ["simulate", str(path), "--capacity-tokens", "640", "--policy", "lru", "--block-size", "64"]
    assert main([*arguments, "--tier", "host=640", "--time-model", "recorded", "--json"]) == 0
    (simulation,) = json.loads(capsys.readouterr().out)
    assert simulation["latency"]["ttft_p95_s"] == pytest.approx(0.03, rel=0.05)
    assert main([*arguments, "--tier", "disk=640", "--time-model", "recorded"]) == 2
    assert "expected requests that loaded from the tier disk, got none" in capsys.readouterr().err


def test_a_trace_without_times_is_refused_as_a_time_model(capsys, loop_trace):
    assert main(["simulate", loop_trace, "--capacity-tokens", "1024", "--time-model", "recorded"]) == 2
    assert "expected requests with `ttft_ms`, which a server records with server.record_path" in capsys.readouterr().err


def test_a_time_model_that_plan_cannot_write_is_refused(capsys, tmp_path):
    plan = ["plan", *SHAPE, "--time-model", str(tmp_path / "times.json")]
    assert main(plan) == 2
    assert "plan: --time-model requires --tier" in capsys.readouterr().err
    assert main([*plan, "--tier", "host=1GB"]) == 2
    assert "plan: --time-model requires --prefill-tokens-per-s, or --params-b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ("4096", 4096),
        ("10.24M", 10_240_000),
        ("unbounded", None),
        ("16GB", 121_856),
        ("16gib", 130_560),
        ("0.5TB", 3_814_400),
        ("68000000b", 512),
    ],
)
def test_the_size_of_a_tier_is_in_tokens_in_bytes_or_unbounded(capsys, loop_trace, size, tokens):
    arguments = ["--capacity-tokens", "1024", "--tier", f"host={size}", *LLAMA_8B, "--json"]
    assert main(["simulate", loop_trace, *arguments]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert [tier["capacity_tokens"] for tier in result["tiers"]] == [tokens]


def test_simulate_plots_with_tiers(capsys, loop_trace, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.png"
    arguments = ["--capacity-tokens", "1k,2k", "--tier", "host=4k", "--plot", str(picture)]
    assert main(["simulate", loop_trace, *arguments]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ("host", "expected NAME=VALUE with names such as host and disk, other than device; got host"),
        ("", "got none"),
        ("device=1k", "got device=1k"),
        ("Host=1k", "got Host=1k"),
        ("host=", "expected a whole number from 1"),
        ("host=-1", "expected a whole number from 1"),
        ("host=0GB", "expected 1 to 1152921504606846976 bytes, got 0GB"),
        ("host=9999999TB", "expected 1 to 1152921504606846976 bytes, got 9999999TB"),
        ("host=1XB", "got 1XB"),
    ],
)
def test_simulate_refuses_an_invalid_tier(capsys, loop_trace, tier, words):
    err = usage_error(capsys, "simulate", loop_trace, "--capacity-tokens", "1k", "--tier", tier)
    assert "--tier: " in err
    assert words in err


@pytest.mark.parametrize("capacity", ["0", "-1", "many", "", "1.5", "2k,,", "infM"])
def test_simulate_refuses_an_invalid_capacity(capsys, chat_trace, capacity):
    err = usage_error(capsys, "simulate", chat_trace, f"--capacity-tokens={capacity}")
    assert "--capacity-tokens: expected a whole number from 1" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "fifo"], "policy: expected one of adaptive, lru, slru, lfu, priority, optimal, got fifo"),
        (["--capacity-tokens", "100"], "capacity_tokens: expected at least a block of 512 tokens, got 100"),
        (
            ["--tier", "host=16GB"],
            "--tier host in bytes: requires --layers, --kv-heads, --head-dim, or a --model whose config.json has "
            "num_hidden_layers, num_key_value_heads, head_dim",
        ),
        (
            ["--tier", "disk=1MB", *LLAMA_8B],
            "tier disk: expected room for a block, 67112960 bytes, got 1000000",
        ),
        (["--tier", "host=1k", "--tier", "host=2k"], "tier host: expected each tier once, got 2"),
        (["--tier", "host=511"], "tier host: expected room for at least a block of 512 tokens, got 511 tokens"),
        (["--plot", "/nowhere/hits.png"], "--plot: expected an existing directory, got /nowhere"),
        (["--plot", "hits.pdf"], "--plot: expected a file name ending in .png, got hits.pdf"),
    ],
)
def test_simulate_refuses_invalid_options(capsys, chat_trace, options, message):
    assert main(["simulate", chat_trace, "--capacity-tokens", "4k", *options]) == 2
    assert capsys.readouterr() == ("", f"radixkv: {message}\n")


def test_simulate_names_the_malformed_line(capsys, chat_trace):
    with open(chat_trace, "a") as file:
        file.write('{"timestamp": 1}\n')
    assert main(["simulate", chat_trace, "--capacity-tokens", "4k"]) == 2
    assert capsys.readouterr().err.startswith(f"radixkv: {chat_trace}:4: hash_ids: expected this field")


def test_simulate_refuses_a_plot_in_place_of_a_directory(capsys, chat_trace, tmp_path):
    (tmp_path / "hits.png").mkdir()
    assert main(["simulate", chat_trace, "--capacity-tokens", "4k", "--plot", str(tmp_path / "hits.png")]) == 2
    message = f"--plot: expected a file that can be written, got {tmp_path / 'hits.png'}"
    assert capsys.readouterr() == ("", f"radixkv: {message}\n")


def test_simulate_names_the_extra_that_a_plot_needs(capsys, chat_trace, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["simulate", chat_trace, "--capacity-tokens", "4k", "--plot", "hits.png"]) == 2
    assert capsys.readouterr().err == (
        "radixkv: --plot: the package matplotlib is missing; "
        "install it from a checkout of radixkv: pip install '.[plot]'\n"
    )
