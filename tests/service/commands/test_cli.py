import contextlib
import gzip
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import grpc
import pytest

from radixkv import __version__
from radixkv.api.retention import Retention
from radixkv.errors import ConfigError, UnsupportedModel
from radixkv.service.client import Client
from radixkv.service.commands.cli import main
from tests.service.fake_engine import FakeEngine
from tests.service.serving import WITHOUT_ENGINE, serve_and_call

LAUNCHER = str(Path(__file__).parents[1] / "serve_fake.py")


def run_cli(capsys, engine, *arguments):
    """Run a command against a server; return its exit code, stdout and stderr."""

    def talk(address):
        return main([*arguments, "--address", address])

    code = serve_and_call(engine, talk)
    return code, *capsys.readouterr()


@contextlib.contextmanager
def fake_service(*arguments, delay_s=0.0):
    """A service in a process of its own; yields the process and its address."""
    command = [sys.executable, LAUNCHER, str(delay_s), "serve", "--port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    try:
        assert select.select([process.stdout], [], [], 20)[0]
        line = process.stdout.readline()
        match = re.fullmatch(r"listening on (127\.0\.0\.1:[1-9]\d*)\n", line)
        assert match, (line, process.stderr.read() if not line else "")
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


def launch(*arguments):
    """Run the command to its end; return its exit code, stdout and stderr."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def install(monkeypatch, build_engine):
    """Put `build_engine` in the place of the real one."""
    stand_in = ModuleType("radixkv.startup.build_engine")
    stand_in.build_engine = build_engine
    monkeypatch.setitem(sys.modules, "radixkv.startup.build_engine", stand_in)


def usage_error(capsys, *arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"radixkv {__version__}\n"


def test_prefill_prints_a_table(capsys):
    code, out, err = run_cli(capsys, FakeEngine(), "prefill", "--tokens", "1,2,3")
    assert (code, err) == (0, "")
    assert re.search(r"^next token +6$", out, re.MULTILINE)
    assert re.search(r"^miss reason +COLD$", out, re.MULTILINE)


def test_prefill_prints_json(capsys):
    code, out, _ = run_cli(capsys, FakeEngine(), "prefill", "--tokens", "1, 2,3", "--top-logprobs", "2", "--json")
    answer = json.loads(out)
    assert code == 0
    usage = {"prompt_tokens": 3, "cached_tokens": 0, "computed_tokens": 3, "written_tokens": 3}
    assert answer["usage"] == {**usage, "generated_tokens": 0, "recomputed_tokens": 0}
    assert len(answer["top_logprobs"]) == 2


def test_prefill_passes_every_option(capsys):
    engine = FakeEngine()
    names = ["--tenant", "t", "--adapter", "a", "--salt", "s"]
    arguments = [*names, "--no-read-cache", "--no-write-cache", "--top-logprobs", "3", "--timeout-s", "30"]
    assert run_cli(capsys, engine, "prefill", "--tokens", "1", *arguments)[0] == 0
    params = engine.params[0]
    assert (params.tenant, params.adapter, params.salt, params.top_logprobs) == ("t", "a", "s", 3)
    assert (params.read_cache, params.write_cache) == (False, False)
    assert params.deadline_s is not None


@pytest.mark.parametrize(
    ("option", "reads_and_writes"),
    [([], (True, True)), (["--no-read-cache"], (False, True)), (["--no-write-cache"], (True, False))],
)
def test_the_cache_is_read_and_written_unless_said_otherwise(capsys, option, reads_and_writes):
    engine = FakeEngine()
    run_cli(capsys, engine, "prefill", "--tokens", "1", *option)
    assert (engine.params[0].read_cache, engine.params[0].write_cache) == reads_and_writes


@pytest.mark.parametrize("text", ["hello", "é€", "a\udcffb"])  # the last is a byte that is no UTF-8, as argv has it
def test_text_is_its_bytes(capsys, text):
    engine = FakeEngine()
    run_cli(capsys, engine, "prefill", "--text", text)
    assert engine.params[0].tokens == b"".join(bytes([b, 0, 0, 0]) for b in os.fsencode(text))


def test_text_goes_through_a_tokenizer(capsys, tmp_path, monkeypatch):
    class Tokenizer:
        def encode(self, text):
            return [len(text)]

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(path, *, local_files_only):
            assert local_files_only
            if path != str(tmp_path):
                raise OSError("not\nthere")
            return Tokenizer()

    stand_in = ModuleType("transformers")
    stand_in.AutoTokenizer = AutoTokenizer
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    engine = FakeEngine()
    assert run_cli(capsys, engine, "prefill", "--text", "hello", "--tokenizer", str(tmp_path))[0] == 0
    assert engine.params[0].tokens == b"\x05\0\0\0"
    code, _, err = run_cli(capsys, engine, "prefill", "--text", "hello", "--tokenizer", "/nowhere")
    assert (code, err) == (2, "radixkv: --tokenizer: expected a directory with a tokenizer, got /nowhere\n")


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
    }
    assert stats["evicted_blocks"] == 2**53 + 1


def test_prefill_asks_for_a_retention_and_shows_the_grant(capsys):
    engine = FakeEngine()
    code, out, _ = run_cli(capsys, engine, "prefill", "--tokens", "1", "--priority", "80", "--ttl-s", "2.5")
    assert code == 0
    assert engine.params[0].retention == Retention(80, 2.5)
    assert re.search(r"^retained +3 tokens \(2 refused\)$", out, re.MULTILINE)
    code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--ttl-s", "2.5")
    assert (code, err) == (2, "radixkv: --ttl-s: expected a --priority with it, got none\n")
    for ttl in ("inf", "nan", "0"):
        code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--priority", "80", "--ttl-s", ttl)
        assert code == 2
        assert err.startswith("radixkv: retention.ttl: expected more than 0")


def test_purge_names_what_it_forgets(capsys):
    engine = FakeEngine()
    code, out, _ = run_cli(capsys, engine, "purge", "--tenant", "acme", "--salt", "")
    assert (code, engine.purges) == (0, [("acme", None, "")])
    assert re.search(r"^blocks freed +7$", out, re.MULTILINE)
    assert re.search(r"^  still in use +2$", out, re.MULTILINE)
    code, _, err = run_cli(capsys, engine, "purge")
    assert (code, err) == (
        2,
        "radixkv: purge: expected either --all, or one or more of --tenant, --adapter, --salt\n",
    )
    assert run_cli(capsys, engine, "purge", "--all", "--tenant", "acme")[0] == 2
    assert run_cli(capsys, engine, "purge", "--all", "--json")[0] == 0
    assert engine.purges[1:] == [(None, None, None)]


def test_a_refusal_is_one_line_and_exit_code_1(capsys):
    code, out, err = run_cli(capsys, FakeEngine(), "prefill", "--tokens", "999")
    assert (code, out) == (1, "")
    assert err == "radixkv: INVALID_ARGUMENT: token_ids: expected 1 or more ids below 256\n"


def test_nobody_listening_is_one_line_and_exit_code_1(capsys):
    assert main(["stats", "--address", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("radixkv: UNAVAILABLE: ")
    assert err.count("\n") == 1


def test_an_answer_that_does_not_come_in_time_is_exit_code_1(capsys):
    engine = FakeEngine(is_gated=True)
    code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--timeout-s", "0.05")
    assert code == 1
    assert err.startswith("radixkv: DEADLINE_EXCEEDED: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["nothing"], "invalid choice"),
        (["stats"], "--address"),
        (["prefill", "--address", "a"], "--tokens --text is required"),
        (["prefill", "--address", "a", "--tokens", "1", "--text", "a"], "not allowed with"),
        (["prefill", "--address", "a", "--tokens", "1,x"], "--tokens: expected integers with commas between"),
        (["prefill", "--address", "a", "--tokens", "-1"], "--tokens"),
        (["prefill", "--address", "a", "--tokens=-1"], "token_ids: expected 0 to 4294967295, got -1"),
        (["prefill", "--address", "a", "--tokens", ""], "--tokens: expected integers"),
        (["prefill", "--address", "a", "--tokens", "1", "--top-logprobs=-1"], "expected a whole number from 0, got -1"),
        (["prefill", "--address", "a", "--tokens", "1", "--tenant", "\udcff"], "--tenant: expected UTF-8"),
        (["serve", "--device", "tpu"], "--device"),
        (["serve", "--port", "x"], "--port"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(capsys, arguments, words):
    assert words in usage_error(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "server.port: expected 0 to 65535, got 70000"),
        (["--set", "cache.block_sise=16"], "cache.block_sise: unknown key; the nearest is cache.block_size"),
        (["--config", "/nowhere.toml"], "config file /nowhere.toml: "),
        (["--model", "/no/model"], "model.path: expected tiny, got /no/model"),
        (["--set", "model.path=a", "--model", 'we"ird'], 'model.path: expected tiny, got we"ird'),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(capsys, monkeypatch, arguments, message):
    def build_engine(config, observer):
        raise UnsupportedModel(f"model.path: expected tiny,\n  got {config.model.path}")

    install(monkeypatch, build_engine)
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"radixkv: {message}")
    assert err.count("\n") == 1


def test_options_win_over_set_and_set_over_the_file(tmp_path, monkeypatch):
    seen = []

    def build_engine(config, observer):
        seen.append(config)
        raise ConfigError("enough")

    install(monkeypatch, build_engine)
    file = tmp_path / "radixkv.toml"
    file.write_text('[model]\npath = "file"\ndevice = "cpu"\n[server]\nport = 1\nhost = "127.0.0.2"\n')
    main(["serve", "--config", str(file), "--set", "model.path=set", "--set", "server.port=0", "--model", 'we"ird\\'])
    assert (seen[0].model.path, seen[0].model.device) == ('we"ird\\', "cpu")
    assert (seen[0].server.port, seen[0].server.host) == (0, "127.0.0.2")


def test_a_missing_extra_is_named(capsys, monkeypatch):
    def build_engine(config, observer):
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    install(monkeypatch, build_engine)
    assert main(["serve", "--port", "0"]) == 2
    assert capsys.readouterr().err == "radixkv: the package torch is missing; install radixkv[engine]\n"


def test_a_module_of_ours_that_is_missing_is_no_missing_extra(monkeypatch):
    def build_engine(config, observer):
        raise ModuleNotFoundError("No module named 'radixkv.lost'", name="radixkv.lost")

    install(monkeypatch, build_engine)
    with pytest.raises(ModuleNotFoundError):
        main(["serve", "--port", "0"])


def test_serving_where_grpc_health_is_missing_names_the_extra():
    program = WITHOUT_ENGINE.replace(' or name == "radixkv.startup.build_engine"', "") + (
        "import types\n"
        "sys.modules['radixkv.startup.build_engine'] = types.SimpleNamespace(build_engine=None)\n"
        "from radixkv.service.commands.cli import main\nsys.exit(main(['serve']))"
    )
    code, _, err = launch("-P", "-c", program)
    assert code == 2
    assert err == "radixkv: the package grpc_health is missing; install radixkv[engine]\n"


def test_serving_where_prometheus_client_is_missing_names_the_extra():
    program = (
        "import sys, types\n"
        "sys.modules['radixkv.startup.build_engine'] = types.SimpleNamespace(build_engine=None)\n"
        "sys.modules['prometheus_client'] = None\n"
        "from radixkv.service.commands.cli import main\nsys.exit(main(['serve']))"
    )
    code, _, err = launch("-P", "-c", program)
    assert code == 2
    assert err == "radixkv: the package prometheus_client is missing; install radixkv[engine]\n"


def test_a_port_in_use_is_a_config_error():
    with fake_service() as (_, address):
        port = address.rpartition(":")[2]
        code, out, err = launch(LAUNCHER, "0", "serve", "--port", port)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        f"radixkv: server.host, server.port: expected a free address of this machine, got 127.0.0.1:{port}"
    )
    assert "Traceback" not in err


PLAN = (sys.executable, "-m", "radixkv.service", "plan", "--layers", "2", "--kv-heads", "2", "--head-dim", "64")


def test_a_reader_that_has_seen_enough_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(PLAN, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_output_that_can_not_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(PLAN, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "radixkv: output: no space left on the device\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(number):
    with fake_service(delay_s=0.5) as (process, address), Client(address, timeout_s=10) as client:
        answers = []
        caller = threading.Thread(target=lambda: answers.append(client.prefill([4]).next_token_id))
        caller.start()
        while client.stats().requests.running == 0:
            pass
        process.send_signal(number)
        code = refusal_code(client)
        process.send_signal(number)  # a second one changes nothing
        caller.join(10)
        out, err = process.communicate(timeout=10)
    assert answers == [4]
    assert code is grpc.StatusCode.UNAVAILABLE
    assert (process.returncode, out) == (0, "")  # the line that was read is all of stdout
    assert "draining" in err
    assert "stopped" in err
    assert "Traceback" not in err


def refusal_code(client):
    """The status of the first prefill that is refused."""
    for _ in range(200):
        try:
            client.prefill([5], timeout_s=0.02)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                return error.code()
    return None


def test_a_drain_that_takes_too_long_cancels_and_exits_0():
    with fake_service("--set", "server.drain_timeout_s=0.1", delay_s=5) as (process, address):
        with Client(address, timeout_s=10) as client:
            failures = []

            def call():
                with pytest.raises(grpc.RpcError) as caught:
                    client.prefill([4])
                failures.append(caught.value.code())

            caller = threading.Thread(target=call)
            caller.start()
            while client.stats().requests.running == 0:
                pass
            process.send_signal(signal.SIGTERM)
            caller.join(10)
        assert process.wait(10) == 0
    assert failures == [grpc.StatusCode.UNAVAILABLE]


def test_the_commands_of_a_client_work_where_the_engine_is_not_installed():
    program = WITHOUT_ENGINE + "from radixkv.service.commands.cli import main\nsys.exit(main(sys.argv[1:]))"

    def talk(address):
        prefill = launch("-P", "-c", program, "prefill", "--address", address, "--text", "hi", "--json")
        return prefill, launch("-P", "-c", program, "stats", "--address", address)

    for code, out, err in serve_and_call(FakeEngine(), talk):
        assert (code, err) == (0, "")
        assert out


def test_the_package_is_the_command():
    assert launch("-P", "-m", "radixkv.service", "--version") == (0, f"radixkv {__version__}\n", "")


# -- simulate ----------------------------------------------------------------------------------------------------------

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
    assert (results[0]["requests"], results[0]["prompt_tokens"], results[0]["cached_tokens"]) == (3, 3100, 512)


def test_simulate_reads_a_compressed_trace(capsys, chat_trace):
    Path(chat_trace + ".gz").write_bytes(gzip.compress(Path(chat_trace).read_bytes()))
    assert main(["simulate", chat_trace + ".gz", "--capacity-tokens", "4k"]) == 0
    assert capsys.readouterr().out.startswith("3 requests, 3,100 prompt tokens")


def test_simulate_prints_a_table_and_takes_a_block_size_and_a_limit(capsys, chat_trace):
    options = ["--capacity-tokens", "64k", "--block-size", "64", "--limit", "2"]
    assert main(["simulate", chat_trace, *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 requests, 1,600 prompt tokens, blocks of 64\n")
    assert re.search(r"^adaptive +64,000 +0\.0000 ", out, re.MULTILINE)


def test_simulate_draws(capsys, chat_trace, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "hits.png"
    arguments = ["--capacity-tokens", "2k,4k", "--policy", "lru", "--plot", str(picture), "--json"]
    assert main(["simulate", chat_trace, *arguments]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {each["policy"] for each in json.loads(capsys.readouterr().out)} == {"lru"}  # the optimum is only drawn


@pytest.mark.parametrize("capacity", ["0", "-1", "many", "", "1.5", "2k,,", "infM"])
def test_simulate_refuses_a_capacity_that_is_none(capsys, chat_trace, capacity):
    err = usage_error(capsys, "simulate", chat_trace, f"--capacity-tokens={capacity}")
    assert "--capacity-tokens: expected a number of tokens from 1" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "fifo"], "policy: expected one of adaptive, lru, slru, lfu, priority, optimal, got fifo"),
        (["--capacity-tokens", "100"], "capacity_tokens: expected at least a block of 512 tokens, got 100"),
        (["--plot", "/nowhere/hits.png"], "--plot: expected an existing directory, got /nowhere"),
        (["--plot", "hits.pdf"], "--plot: expected a file name ending in .png, got hits.pdf"),
    ],
)
def test_simulate_refuses_nonsense(capsys, chat_trace, options, message):
    assert main(["simulate", chat_trace, "--capacity-tokens", "4k", *options]) == 2
    assert capsys.readouterr() == ("", f"radixkv: {message}\n")


def test_simulate_names_the_malformed_line(capsys, chat_trace):
    with open(chat_trace, "a") as file:
        file.write('{"timestamp": 1}\n')
    assert main(["simulate", chat_trace, "--capacity-tokens", "4k"]) == 2
    assert capsys.readouterr().err.startswith(f"radixkv: {chat_trace}:4: hash_ids: expected this field")


def test_simulate_says_which_extra_a_picture_needs(capsys, chat_trace, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["simulate", chat_trace, "--capacity-tokens", "4k", "--plot", "hits.png"]) == 2
    assert capsys.readouterr().err == "radixkv: --plot: the package matplotlib is missing; install radixkv[dev]\n"
