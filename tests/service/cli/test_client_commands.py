import json
import re
from types import SimpleNamespace

import pytest

from radixkv.api.caller import Caller
from radixkv.service.cli.main import main
from tests.patience import PATIENCE_S
from tests.service.command_line import fake_service, launch, run_cli
from tests.service.fake_engine import FakeEngine
from tests.service.server.identity.certificates import TOKENS, Papers
from tests.service.serving import WITHOUT_ENGINE, serve_and_call


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
    rest = {"generated_tokens": 0, "recomputed_tokens": 0, "public_tokens": 0}
    tiers = {"device_tokens": 0, "host_tokens": 0, "disk_tokens": 0, "remote_tokens": 0}
    assert answer["usage"] == {**usage, **rest, **tiers}
    assert len(answer["top_logprobs"]) == 2


def test_prefill_passes_every_option(capsys):
    engine = FakeEngine()
    names = ["--tenant", "t", "--adapter", "a", "--salt", "s"]
    arguments = [*names, "--no-read-cache", "--no-write-cache", "--top-logprobs", "3", "--timeout-s", "30"]
    assert run_cli(capsys, engine, "prefill", "--tokens", "1", *arguments)[0] == 0
    params = engine.params[0]
    assert (params.caller, params.top_logprobs) == (Caller("t", "a", "s"), 3)
    assert (params.read_cache, params.write_cache) == (False, False)
    assert params.deadline_s is not None


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
    monkeypatch.setattr("radixkv.service.cli.client_commands.time", SimpleNamespace(sleep=sleep))
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


def test_a_watch_as_json_is_an_object_a_line(capsys, pauses_s):
    out = run_cli(capsys, FakeEngine(), "stats", "--watch", "--json")[1]
    assert [json.loads(line)["model"] for line in out.splitlines()] == ["fake"] * 3


def test_a_watch_ends_when_the_service_does(capsys):
    assert main(["stats", "--watch", "--address", "127.0.0.1:1", "--timeout-s", "5"]) == 1
    assert capsys.readouterr().err.startswith("radixkv: UNAVAILABLE: ")


@pytest.mark.parametrize("retries", ["-1", "5"])
def test_retries_are_bounded(capsys, retries):
    assert main(["stats", f"--retries={retries}"]) == 2
    assert capsys.readouterr().err == f"radixkv: retries: expected 0 to 4, got {retries}\n"


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
    assert capsys.readouterr().err == (
        "radixkv: UNAVAILABLE: nothing answers at 127.0.0.1:1; is `radixkv serve` running there?\n"
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
def test_a_certificate_that_is_none_is_refused_before_a_call(capsys, tmp_path, content):
    Papers(tmp_path)
    (tmp_path / "junk.pem").write_bytes(content)
    tls = ["--tls-ca", str(tmp_path / "ca.pem"), "--certificate", str(tmp_path / "junk.pem")]
    assert main(["stats", *tls, "--key", str(tmp_path / "server.key")]) == 2
    assert capsys.readouterr().err.startswith("radixkv: certificate, key: expected a certificate chain and its private")


def test_an_answer_that_does_not_come_in_time_is_exit_code_1(capsys):
    engine = FakeEngine(is_gated=True)
    code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--timeout-s", "0.05")
    assert code == 1
    assert err.startswith("radixkv: DEADLINE_EXCEEDED: ")


def test_the_commands_of_a_client_work_where_the_engine_is_not_installed():
    program = WITHOUT_ENGINE + "from radixkv.service.cli.main import main\nsys.exit(main(sys.argv[1:]))"

    def talk(address):
        prefill = launch("-P", "-c", program, "prefill", "--address", address, "--text", "hi", "--bytes", "--json")
        return prefill, launch("-P", "-c", program, "stats", "--address", address)

    for code, out, err in serve_and_call(FakeEngine(), talk):
        assert (code, err) == (0, "")
        assert out


def test_drain_asks_the_service_to_end():
    with fake_service() as (process, address):
        assert main(["drain", "--address", address]) == 0
        assert process.wait(PATIENCE_S) == 0


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, monkeypatch, capsys):
    papers = Papers(tmp_path)
    file = tmp_path / "acme.token"
    file.write_text(TOKENS["acme"] + "\n")
    engine = FakeEngine()

    def talk(address):
        call = ["prefill", "--tokens", "1,2", "--address", address, "--tls-ca", str(papers.ca_file)]
        codes = [main([*call, "--token-file", str(file)]), main(call)]
        monkeypatch.setenv("RADIXKV_TOKEN", TOKENS["globex"])
        return [*codes, main(call)]

    assert serve_and_call(engine, talk, **papers.tls) == [0, 1, 0]
    assert [params.caller.tenant for params in engine.params] == ["acme", "globex"]
    assert "radixkv: UNAUTHENTICATED: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--token-file: expected a readable file, got "),
        ("\n", "none.token: expected a token, got an empty file"),
        ("two words", "token: expected printable"),
    ],
)
def test_a_token_file_that_holds_no_token_is_one_line(tmp_path, capsys, content, message):
    file = tmp_path / "none.token"
    if content is not None:
        file.write_text(content)
    assert main(["stats", "--token-file", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_tenant_is_shown_what_it_may_know(tmp_path, capsys):
    code, out, _ = run_cli(capsys, FakeEngine(), "stats", "--tenant", "a")
    assert code == 0
    assert re.search(r"^tenant a +3 blocks", out, re.MULTILINE)
    assert "prompt tokens" not in out
    assert "tenant b" not in out
