from __future__ import annotations

import builtins
import sys

import pytest

from radixkv.service.cli.main import main
from tests.service.command_line import usage_error
from tests.service.server.auth.certificates import CredentialFiles


@pytest.mark.parametrize("replicas", ["0", "3:2", "0:2", "two", "-1", "1:"])
def test_a_wrong_number_of_replicas_is_refused(replicas, capsys) -> None:
    assert main(["fleet", f"--replicas={replicas}"]) == 2
    assert "--replicas: expected N, or N:M" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--prefill-replicas", "1"],
            "fleet.prefill_replicas requires fleet.decode_replicas",
        ),
        (
            ["--decode-replicas", "1"],
            "fleet.decode_replicas requires fleet.prefill_replicas",
        ),
        (["--prefill-replicas", "0", "--decode-replicas", "1"], "fleet.prefill_replicas: expected"),
        (
            ["--replicas", "2", "--prefill-replicas", "1", "--decode-replicas", "1"],
            "--replicas: can't be combined with fleet.prefill_replicas and fleet.decode_replicas",
        ),
    ],
)
def test_numbers_by_role_require_each_other_and_exclude_replicas(flags, message, capsys) -> None:
    assert main(["fleet", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting",
    [
        "server.admin_port=0",
        "server.metrics_port=9400",
        "events.zmq_endpoint=tcp://127.0.0.1:5557",
        "events.replay_endpoint=tcp://127.0.0.1:5558",
    ],
)
def test_options_of_a_single_server_are_refused(setting, capsys) -> None:
    key, _, value = setting.partition("=")
    assert main(["fleet", "--set", setting]) == 2
    assert capsys.readouterr().err == f"radixkv: {key}: a fleet does not support it, got {value}; leave it out\n"


def test_a_role_for_all_replicas_is_refused(capsys) -> None:
    assert main(["fleet", "--set", "transfer.role=prefill"]) == 2
    assert "transfer.role: expected both in a fleet, got prefill; use --prefill-replicas" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--cpus", "--gpus"])
@pytest.mark.parametrize("value", ["nan", "-1", "inf", "10001", "many"])
def test_a_wrong_number_of_processors_is_refused(flag, value, capsys) -> None:
    assert f"{flag}: expected 0 to 10000, got {value}" in usage_error(capsys, "fleet", f"{flag}={value}")


def test_a_host_that_is_not_of_this_machine_is_refused_even_if_the_port_is_0(capsys) -> None:
    assert main(["fleet", "--host", "192.0.2.1", "--port", "0", "--insecure"]) == 2
    message = "server.host, server.port: expected a free address of this machine, got 192.0.2.1:0"
    assert message in capsys.readouterr().err


def test_sources_of_kv_are_checked_before_anything_starts(tmp_path, capsys) -> None:
    source = ["--set=kv_sources.a.address=127.0.0.1:1", f"--set=kv_sources.a.tls_ca={tmp_path / 'absent'}"]
    assert main(["fleet", *source]) == 2
    assert "kv_sources.a.tls_ca: expected a file of certificates" in capsys.readouterr().err


def test_a_fleet_beyond_this_machine_needs_credentials(capsys) -> None:
    assert main(["fleet", "--host", "0.0.0.0"]) == 2
    assert "server.host: expected 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "node"])
def test_replicas_beyond_this_machine_require_credentials_or_insecure(host, capsys) -> None:
    assert main(["fleet", "--replica-host", host]) == 2
    assert "--replica-host: expected 127.0.0.1" in capsys.readouterr().err


def test_tokens_are_sent_to_replicas_on_other_machines_only_over_tls(tmp_path, capsys) -> None:
    credential_files = CredentialFiles(tmp_path)
    flags = ["--replica-host", "node", *(f"--set=server.{key}={value}" for key, value in credential_files.tls.items())]
    assert main(["fleet", *flags, "--insecure"]) == 2
    assert "tokens would be sent to replicas unencrypted" in capsys.readouterr().err
    messages = {"absent": "expected a file of certificates", "tokens.toml": f"{tmp_path / 'tokens.toml'} contains no"}
    for name, message in messages.items():
        assert main(["fleet", *flags, f"--set=fleet.tls_ca={tmp_path / name}"]) == 2
        assert f"fleet.tls_ca: {message}" in capsys.readouterr().err


def test_tls_of_replicas_is_that_of_the_server(tmp_path, capsys) -> None:
    credential_files = CredentialFiles(tmp_path)
    assert main(["fleet", f"--set=fleet.tls_ca={credential_files.ca_file}"]) == 2
    assert "fleet.tls_ca: requires server.tls_certificate" in capsys.readouterr().err
    tls = [f"--set=server.{key}={credential_files.tls[key]}" for key in ("tls_certificate", "tls_key")]
    assert main(["fleet", "--replica-host", "node", f"--set=fleet.tls_ca={credential_files.ca_file}", *tls]) == 2
    assert "without server.tokens_file and fleet.tls_ca" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch, capsys) -> None:
    original_import = builtins.__import__

    def import_all_but_ray(name, *arguments, **named_arguments):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        return original_import(name, *arguments, **named_arguments)

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(builtins, "__import__", import_all_but_ray)
    # The command sets these variables; `monkeypatch` restores them after the test.
    for name in (
        "RAY_USAGE_STATS_ENABLED",
        "RAY_SERVE_LOG_TO_STDERR",
        "RAY_worker_niceness",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    ):
        monkeypatch.setenv(name, "0")
    assert main(["fleet", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "the package ray is missing" in err
    assert "pip install '.[ray]'" in err
