import json

import pytest

from radixkv.service.cli.main import main
from tests.service.command_line import launch, run_cli
from tests.service.fake_engine import FakeEngine
from tests.service.server.auth.certificates import TOKENS, CredentialFiles
from tests.service.serving import WITHOUT_ENGINE, serve_and_call


@pytest.mark.parametrize("retries", ["-1", "5"])
def test_retries_are_bounded(capsys, retries):
    assert main(["stats", f"--retries={retries}"]) == 2
    assert capsys.readouterr().err == f"radixkv: retries: expected 0 to 4, got {retries}\n"


def test_a_refusal_is_one_line_and_exit_code_1(capsys):
    code, out, err = run_cli(capsys, FakeEngine(), "prefill", "--tokens", "999")
    assert (code, out) == (1, "")
    assert err == "radixkv: INVALID_ARGUMENT: token_ids: expected 1 or more ids below 256\n"


def test_an_unreachable_server_is_one_line_and_exit_code_1(capsys):
    assert main(["stats", "--address", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    assert capsys.readouterr().err == (
        "radixkv: UNAVAILABLE: no server is listening at 127.0.0.1:1; is `radixkv serve` running there?\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["prefill", "--tokens", "1,2"],
        ["generate", "--tokens", "1,2"],
        ["generate", "--text", "a", "--bytes"],
        ["stats"],
        ["top", "--once"],
        ["segments"],
        ["adapters", "list"],
        ["public", "list"],
        ["purge", "--all"],
        ["drain"],
    ],
)
def test_json_is_all_that_is_printed(capsys, arguments):
    code, out, err = run_cli(capsys, FakeEngine(), *arguments, "--json")
    assert (code, err) == (0, "")
    assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize("option", ["--tls-ca", "--token-file"])
def test_a_file_that_can_not_be_read_is_named_with_its_option(capsys, tmp_path, option):
    for path, reason in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        assert main(["stats", option, str(path)]) == 2
        assert capsys.readouterr() == ("", f"radixkv: {option}: expected a readable file, got {path}: {reason}\n")


@pytest.mark.parametrize("content", [b"", b"junk"])
def test_a_file_without_a_certificate_is_refused_before_the_call(capsys, tmp_path, content):
    CredentialFiles(tmp_path)
    (tmp_path / "junk.pem").write_bytes(content)
    tls = ["--tls-ca", str(tmp_path / "ca.pem"), "--certificate", str(tmp_path / "junk.pem")]
    assert main(["stats", *tls, "--key", str(tmp_path / "server.key")]) == 2
    assert capsys.readouterr().err.startswith("radixkv: certificate, key: expected a certificate chain and its private")


def test_a_call_that_is_not_answered_in_time_is_exit_code_1(capsys):
    engine = FakeEngine(is_gated=True)
    code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--timeout-s", "0.05")
    assert code == 1
    assert err.startswith("radixkv: DEADLINE_EXCEEDED: ")


def test_the_commands_of_a_client_work_where_the_engine_is_not_installed():
    source = WITHOUT_ENGINE + "from radixkv.service.cli.main import main\nsys.exit(main(sys.argv[1:]))"

    def talk(address):
        prefill = launch("-P", "-c", source, "prefill", "--address", address, "--text", "hi", "--bytes", "--json")
        return prefill, launch("-P", "-c", source, "stats", "--address", address)

    for code, out, err in serve_and_call(FakeEngine(), talk):
        assert (code, err) == (0, "")
        assert out


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch, capsys):
    credential_files = CredentialFiles(tmp_path)
    file = tmp_path / "acme.token"
    file.write_text(TOKENS["acme"] + "\n")
    engine = FakeEngine()

    def talk(address):
        call = ["prefill", "--tokens", "1,2", "--address", address, "--tls-ca", str(credential_files.ca_file)]
        code_with_file = main([*call, "--token-file", str(file)])
        code_without_token = main(call)
        monkeypatch.setenv("RADIXKV_TOKEN", TOKENS["globex"])
        code_with_variable = main(call)
        return [code_with_file, code_without_token, code_with_variable]

    assert serve_and_call(engine, talk, **credential_files.tls) == [0, 1, 0]
    assert [params.caller.tenant for params in engine.params] == ["acme", "globex"]
    assert "radixkv: UNAUTHENTICATED: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--token-file: expected a readable file, got "),
        ("\n", "none.token is empty; it must contain a token"),
        ("two words", "token: expected printable"),
    ],
)
def test_a_token_file_that_holds_no_token_is_one_line(tmp_path, capsys, content, message):
    file = tmp_path / "none.token"
    if content is not None:
        file.write_text(content)
    assert main(["stats", "--token-file", str(file)]) == 2
    assert message in capsys.readouterr().err
