import gc
import json
import logging
import re
import signal
import sys
import threading
from datetime import datetime
from functools import partial

import grpc
import pytest

from radixkv import __version__
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError, UnsupportedModel
from radixkv.service.cli import serve
from radixkv.service.cli.main import main
from radixkv.service.cli.serve import JsonLines
from radixkv.service.client import Client
from radixkv.startup.progress import StartProgress
from tests.patience import PATIENCE_S, wait_until
from tests.service.command_line import LAUNCHER, fake_service, launch, replace_build_engine
from tests.service.text.tokenizers import write_tiny
from tests.started_threads import started_threads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "server.port: expected 0 to 65535, got 70000"),
        (["--role", "decode"], "transfer.role: the role decode requires a section kv_sources to fetch from"),
        (
            ["--set", "kv_sources.a.address=127.0.0.1:1", "--set", "kv_sources.a.tls_ca=/nowhere.pem"],
            "kv_sources.a.tls_ca: expected a file of certificates in PEM, got ",
        ),
        (["--host", "0.0.0.0"], "server.host: expected 127.0.0.1, ::1 or localhost without server.tokens_file"),
        (["--set", "server.tokens_file=/nowhere.toml", "--insecure"], "server.tokens_file: expected a readable file"),
        (["--host", "0.0.0.0", "--insecure"], "model.dtype: expected float32"),
        (["--set", "cache.block_sise=16"], "cache.block_sise: unknown key; the nearest is cache.block_size"),
        (["--config", "/nowhere.toml"], "config file /nowhere.toml: "),
        (["--set", "model.dtype=bfloat16"], "model.dtype: expected float32, got bfloat16"),
        (
            ["--set", "model.path=a", "--model", 'we"ird'],
            "model.path: expected `tiny`, a directory with a config.json",
        ),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(capsys, monkeypatch, arguments, message):
    def build_engine(config, observers, progress):
        raise UnsupportedModel(f"model.dtype: expected float32,\n  got {config.model.dtype}")

    replace_build_engine(monkeypatch, build_engine)
    assert main(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"radixkv: {message}")
    assert err.count("\n") == 1


def test_options_override_set_and_set_overrides_the_file(tmp_path, monkeypatch):
    configs = []

    def build_engine(config, observers, progress):
        configs.append(config)
        raise ConfigError("enough")

    replace_build_engine(monkeypatch, build_engine)
    file = tmp_path / "radixkv.toml"
    model = tmp_path / 'we"ird\\'
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    file.write_text('[model]\npath = "file"\ndevice = "cpu"\n[server]\nport = 1\nhost = "127.0.0.2"\n')
    main(["serve", "--config", str(file), "--set", "model.path=set", "--set", "server.port=0", "--model", str(model)])
    assert (configs[0].model.path, configs[0].model.device) == (str(model), "cpu")
    assert (configs[0].server.port, configs[0].server.host) == (0, "127.0.0.2")


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from radixkv.service.cli.main import main; "


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {},
            "expected `tiny`, a directory with a config.json, a GGUF file, or ORG/NAME of a downloaded model, got {}",
        ),
        ({"config.json": "{}"}, "{} has no model.safetensors"),
    ],
)
def test_a_wrong_model_directory_is_one_line_before_torch_is_imported(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    program = WITHOUT_TORCH + "sys.exit(main(['serve', '--port', '0', '--model', sys.argv[1]]))"
    code, out, err = launch("-P", "-c", program, str(tmp_path))
    assert (code, out, err) == (2, "", f"radixkv: model.path: {message.format(tmp_path)}\n")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tiers.redis_url=nope", "tiers.redis_url: expected redis://HOST:PORT/DB, got something else"),
        ("events.zmq_endpoint=nope", "events.zmq_endpoint: expected a ZMQ address that can be bound"),
        ("tiers.secret_file=/nowhere", "tiers.secret_file: expected a readable file, got /nowhere: No such file"),
        ("adapters.law.path=/nowhere", "adapters.law.path: adapter_config.json: expected a file"),
        ("stores.shelf.place=x", "stores.shelf: expected the name of an installed package's entry point"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_before_torch_is_imported(setting, message):
    program = WITHOUT_TORCH + "sys.exit(main(['serve', '--port', '0', '--set', sys.argv[1]]))"
    code, out, err = launch("-P", "-c", program, setting)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"radixkv: {message}")


def test_serve_says_what_it_loads_before_torch_is_imported(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(20_000_000))
    options = ["--port", "0", "--set", "model.dtype=bfloat16", "--device", "cpu"]
    program = WITHOUT_TORCH + f"sys.exit(main(['serve', '--model', sys.argv[1], *{options}]))"
    code, _, err = launch("-P", "-c", program, str(tmp_path))
    first, *_, last = err.splitlines()
    assert first.endswith(
        f"radixkv {__version__} is starting: {tmp_path} (0.02 GB of weights), device cpu, dtype bfloat16"
    )
    assert (code, last) == (2, f"radixkv: {missing_package('torch', 'engine')}")


# Prints the imported modules of those that take long to import, and the text, at the first write to stderr.
FIRST_WRITE = (
    "import os, sys\n"
    "class FirstWrite:\n"
    "    def write(self, text):\n"
    "        heavy = {'grpc', 'google', 'numpy', 'torch', 'transformers', 'asyncio'}\n"
    "        print(sorted(heavy & sys.modules.keys()), text, flush=True)\n"
    "        os._exit(0)\n"
    "    def flush(self): pass\n"
    "sys.stderr = FirstWrite()\n"
    "from radixkv.service.cli.main import main\n"
    "main(['serve', '--port', '0', *sys.argv[1:]])"
)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_first_line_of_the_log_is_written_before_large_modules_are_imported(log_format):
    code, out, _ = launch("-P", "-c", FIRST_WRITE, "--log-format", log_format)
    assert code == 0
    assert out.startswith("[] ")
    assert f"radixkv {__version__} is starting" in out


def test_a_phase_that_takes_long_is_logged_again_until_the_start_ends(monkeypatch, caplog):
    started = started_threads()

    def num_reminders():
        return sum(message.startswith("still importing PyTorch and transformers after ") for message in caplog.messages)

    def build_engine(config, observers, progress):
        wait_until(lambda: num_reminders() >= 2)
        raise ConfigError("enough")

    replace_build_engine(monkeypatch, build_engine)
    monkeypatch.setattr(serve, "StartProgress", partial(StartProgress, reminder_s=0.01))
    with caplog.at_level(logging.INFO, logger="radixkv"):
        assert main(["serve", "--port", "0"]) == 2
    assert num_reminders() >= 2
    assert not started("start-progress")


def test_a_chat_template_that_ends_answers_with_another_token_is_reported(tmp_path, caplog):
    directory = str(write_tiny(tmp_path / "model"))
    with caplog.at_level(logging.WARNING):
        serve._warn_of_turn_end(directory, {509, 511})  # 511 is <|im_end|>, with which the template ends answers
        (tmp_path / "config.json").write_text("{}")
        serve._warn_of_turn_end(str(tmp_path), {509})  # no tokenizer
        serve._warn_of_turn_end("tiny", {509})
        assert not caplog.messages
        serve._warn_of_turn_end(directory, {509})
    (message,) = caplog.messages
    assert message.startswith("the chat template ends answers with <|im_end|> (511), which neither")


def test_the_phases_of_a_start_are_logged_before_the_address_is_printed():
    with fake_service() as (process, _):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    # A line has a date, a time, a level, a logger and a message.
    messages = [line.split(" ", 4)[4] for line in err.splitlines() if line.split()[3] == "radixkv.startup.progress"]
    phases = [message for message in messages if not message.startswith("still ")]  # reminders, on a slow machine
    assert phases[:-1] == [
        "checking the configuration",
        "importing the server",
        "importing PyTorch and transformers",
        "starting to listen",
    ]
    assert re.fullmatch(r"ready after \d+\.\d s", phases[-1])


def test_the_log_is_lines_of_json_if_requested():
    with fake_service("--log-format", "json") as (process, _):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
    lines = [json.loads(line) for line in err.splitlines()]
    assert all(list(line) == ["time", "level", "logger", "message"] for line in lines)
    first_message = f"radixkv {__version__} is starting: the embedded model tiny, device auto, dtype auto"
    assert lines[0]["message"] == first_message
    assert lines[-1]["message"] == "stopped"
    assert datetime.fromisoformat(lines[0]["time"]).tzinfo is not None


def test_messages_below_the_log_level_are_not_logged():
    with fake_service("--log-level", "error") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=PATIENCE_S)[1] == ""


def test_a_line_of_json_has_the_traceback():
    try:
        raise ValueError("text\nof two lines")
    except ValueError:
        record = logging.makeLogRecord({"msg": "a %s", "args": ("b",), "exc_info": sys.exc_info()})
    line = JsonLines().format(record)
    assert line.count("\n") == 0
    assert json.loads(line)["message"] == "a b"
    assert json.loads(line)["exception"].endswith("ValueError: text\nof two lines")


def test_a_missing_extra_is_named(capsys, monkeypatch):
    def build_engine(config, observers, progress):
        raise ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn")

    replace_build_engine(monkeypatch, build_engine)
    assert main(["serve", "--port", "0"]) == 2
    assert capsys.readouterr().err == f"radixkv: {missing_package('torch', 'engine')}\n"


def test_a_module_of_ours_that_is_missing_is_no_missing_extra(monkeypatch):
    def build_engine(config, observers, progress):
        raise ModuleNotFoundError("No module named 'radixkv.lost'", name="radixkv.lost")

    replace_build_engine(monkeypatch, build_engine)
    with pytest.raises(ModuleNotFoundError):
        main(["serve", "--port", "0"])


def test_serving_where_a_package_of_the_server_is_missing_names_the_extra():
    program = (
        "import sys, types\n"
        "sys.modules['radixkv.startup.build_engine'] = types.SimpleNamespace(build_engine=None)\n"
        "sys.modules['prometheus_client'] = None\n"
        "from radixkv.service.cli.main import main\nsys.exit(main(['serve', '--port', '0']))"
    )
    code, _, err = launch("-P", "-c", program)
    assert (code, err.splitlines()[-1]) == (2, f"radixkv: {missing_package('prometheus_client', 'engine')}")


def test_a_port_in_use_is_a_config_error():
    with fake_service() as (_, address):
        port = address.rpartition(":")[2]
        code, out, err = launch(LAUNCHER, "open", "serve", "--port", port)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        f"radixkv: server.host, server.port: expected a free address of this machine, got 127.0.0.1:{port}"
    )
    assert "Traceback" not in err


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_0(signal_number):
    with fake_service(gate="shut") as (process, address), Client(address, timeout_s=PATIENCE_S) as client:
        answers = []
        caller = threading.Thread(target=lambda: answers.append(client.prefill([4]).next_token_id))
        caller.start()
        wait_until(lambda: client.stats().requests.running == 1)
        process.send_signal(signal_number)
        code = refusal_code(client)
        process.send_signal(signal_number)  # a second signal changes nothing
        process.send_signal(signal.SIGUSR1)
        caller.join(PATIENCE_S)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert answers == [4]
    assert code is grpc.StatusCode.UNAVAILABLE
    assert (process.returncode, out) == (0, "")  # `fake_service` has read the only line of stdout, with the address
    assert "draining" in err
    assert "stopped" in err
    assert "Traceback" not in err


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_interrupt_an_engine_that_stops(signal_number):
    with fake_service(gate="slow") as (process, _):
        process.send_signal(signal.SIGTERM)
        assert any("the engine stops" in line for line in process.stderr)
        process.send_signal(signal_number)
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def refusal_code(client):
    """Return the status of the first prefill that is refused."""
    for tries in range(20):
        try:
            client.prefill([5], timeout_s=0.02 * 1.5**tries)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                return error.code()
    return None


def test_a_drain_that_takes_too_long_cancels_and_exits_0():
    with fake_service("--set", "server.drain_timeout_s=0.1", gate="shut") as (process, address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            failures = []

            def call():
                with pytest.raises(grpc.RpcError) as caught:
                    client.prefill([4])
                failures.append(caught.value.code())

            caller = threading.Thread(target=call)
            caller.start()
            wait_until(lambda: client.stats().requests.running == 1)
            process.send_signal(signal.SIGTERM)
            caller.join(PATIENCE_S)
        assert process.wait(PATIENCE_S) == 0
    assert failures == [grpc.StatusCode.UNAVAILABLE]


def test_imports_are_left_alone_by_garbage_collection(monkeypatch):
    collector_states = []

    def build_engine(config, observers, progress):
        collector_states.append((gc.isenabled(), gc.get_freeze_count()))
        raise ConfigError("enough")

    replace_build_engine(monkeypatch, build_engine)
    try:
        main(["serve", "--port", "0"])
    finally:
        gc.unfreeze()
    ((is_enabled, num_frozen),) = collector_states
    assert is_enabled
    assert num_frozen > 10_000
