import re
import stat

import pytest

from radixkv.service.cli.main import main
from radixkv.service.server.auth.credentials import parse_credentials, read_credentials
from radixkv.service.server.auth.identity import Identity, Role
from tests.service.command_line import usage_error


def test_a_token_is_printed_once_and_only_its_hash_is_kept(capsys, tmp_path):
    file = tmp_path / "tokens.toml"
    assert main(["token", "new", "--name", "acme", "--tenant", "acme", "--file", str(file)]) == 0
    assert main(["token", "new", "--name", "front", "--router", "acme,globex", "--file", str(file)]) == 0
    out, err = capsys.readouterr()
    first, second = out.split()
    assert err == ""
    assert re.fullmatch(r"rkv_[\w-]{43}", first)
    assert first not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    credentials = read_credentials(file)
    assert credentials.of_token(first).identity == Identity("acme", Role.TENANT, frozenset({"acme"}))
    assert credentials.of_token(second).identity == Identity("front", Role.ROUTER, frozenset({"acme", "globex"}))


@pytest.mark.parametrize(
    ("arguments", "identity"),
    [
        (["--admin"], Identity('we"ird', Role.ADMIN)),
        (["--reader"], Identity('we"ird', Role.READER, frozenset())),
        (["--router", "all"], Identity('we"ird', Role.ROUTER)),
        (["--router", "acme, globex"], Identity('we"ird', Role.ROUTER, frozenset({"acme", "globex"}))),
        (["--tenant", ""], Identity('we"ird', Role.TENANT, frozenset({""}))),
    ],
)
def test_without_a_file_the_entry_is_on_stderr(capsys, arguments, identity):
    assert main(["token", "new", "--name", 'we"ird', *arguments, "--days", "1"]) == 0
    out, err = capsys.readouterr()
    credential = parse_credentials(err).of_token(out.strip())
    assert credential.identity == identity
    assert credential.expires_at_s is not None


def test_a_name_that_is_taken_leaves_the_file_as_it_is_and_prints_no_token(capsys, tmp_path):
    file = tmp_path / "tokens.toml"
    main(["token", "new", "--name", "acme", "--tenant", "acme", "--file", str(file)])
    before = file.read_text()
    capsys.readouterr()
    assert main(["token", "new", "--name", "acme", "--admin", "--file", str(file)]) == 2
    out, err = capsys.readouterr()
    assert (out, file.read_text()) == ("", before)
    assert "another entry has the same name, token or certificate" in err


def test_a_file_that_can_not_be_written_is_one_line(capsys, tmp_path):
    assert main(["token", "new", "--name", "a", "--admin", "--file", str(tmp_path / "no" / "file")]) == 2
    assert "--file: expected a file that can be read and written" in capsys.readouterr().err


def test_a_file_that_is_no_text_stays_as_it_is(capsys, tmp_path):
    file = tmp_path / "tokens.toml"
    file.write_bytes(b"\xff")
    assert main(["token", "new", "--name", "a", "--admin", "--file", str(file)]) == 2
    assert capsys.readouterr().err == "radixkv: --file: the file is not UTF-8\n"
    assert file.read_bytes() == b"\xff"


def test_a_token_has_exactly_one_role(capsys):
    assert "one of the arguments" in usage_error(capsys, "token", "new", "--name", "a")
    assert "not allowed with" in usage_error(capsys, "token", "new", "--name", "a", "--admin", "--tenant", "t")
