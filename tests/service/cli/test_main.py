import argparse
import os
import re
import subprocess
import sys

import pytest

from radixkv import __version__
from radixkv.service.cli.main import COMMANDS, main, make_parser
from tests.patience import PATIENCE_S
from tests.service.command_line import launch, usage_error


def test_the_option_version_prints_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"radixkv {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["nothing"], "invalid choice"),
        (["prefill", "--address", "a"], "one of the arguments --text --text-file --tokens --tokens-file is required"),
        (["prefill", "--address", "a", "--tokens", "1", "--text", "a"], "not allowed with"),
        (
            ["prefill", "--address", "a", "--tokens", "1,x"],
            "--tokens: expected integers, separated by commas or spaces, got 'x'",
        ),
        (["prefill", "--address", "a", "--tokens", "-1"], "--tokens"),
        (["prefill", "--tokens", "99999999999"], "token_ids: expected 0 to 4294967295, got 99999999999; see"),
        (["prefill", "--address", "a", "--tokens=-1"], "token_ids: expected 0 to 4294967295, got -1"),
        (["prefill", "--address", "a", "--tokens", ""], "--tokens: expected integers"),
        (["prefill", "--text", ""], "--text: expected text, got an empty string"),
        (["generate", "--chat", "--text", ""], "--text: expected text, got an empty string"),
        (["prefill", "--text-file", "/dev/null"], "argument --text-file: /dev/null is empty; it must contain text"),
        (["prefill", "--text-file", "/none.txt"], "--text-file: expected a file, got /none.txt: No such file or"),
        (["prefill", "--tokens-file", "/none.txt"], "--tokens-file: expected a file, got /none.txt: No such file or"),
        (["generate", "--tokens", "1", "--json-schema", "/none.json"], "got '/none.json': no such file"),
        (["generate", "--tokens", "1", "--grammar", "/none.lark"], "got '/none.lark': no such file"),
        (["prefill", "--tokens", "1", "--urgency", ""], "--urgency: expected 0 to 100, got an empty string"),
        (
            ["prefill", "--address", "a", "--tokens", "1", "--top-logprobs=-1"],
            "expected a whole number from 0, such as",
        ),
        (["prefill", "--address", "a", "--tokens", "1", "--tenant", "\udcff"], "--tenant: expected UTF-8"),
        (["generate", "--tokens", "1", "--regex", "\udcff"], "--regex: expected UTF-8"),
        (["generate", "--tokens", "1", "--stop", "\udcff"], "--stop: expected UTF-8"),
        (["generate", "--text", "a", "--chat", "--system", "\udcff"], "--system: expected UTF-8"),
        (["segments", "--store", "\udcff"], "--store: expected UTF-8"),
        (["segments", "--page-token", "\udcff"], "--page-token: expected UTF-8"),
        (["adapters", "load", "law", "\udcff"], "path: expected UTF-8"),
        (["token", "new", "--name", "a", "--router", "\udcff"], "--router: expected UTF-8"),
        (["token", "new", "--name", "a", "--admin", "--days", "5000000"], "--days: expected more than 0"),
        (["stats", "--address", "\udcff:1"], "--address: expected UTF-8"),
        (["stats", "--watch", "1e10"], "--watch: expected more than 0 and at most 86400"),
        (["top", "--interval", "1e10"], "--interval: expected more than 0 and at most 86400"),
        (["serve", "--device", "tpu"], "--device"),
        (["serve", "--port", "x"], "--port"),
        (["stats", "--tls_ca", "a"], "unrecognized arguments: --tls_ca a; see radixkv stats --help"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(capsys, arguments, words):
    assert words in usage_error(capsys, *arguments)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["nothing"], ["serve", "--help"], ["serve", "--x"]])
def test_help_and_wrong_arguments_do_not_wait_for_imports(arguments):
    program = (
        "import atexit, sys\n"
        "heavy = {'grpc', 'google', 'numpy', 'torch', 'transformers', 'asyncio'}\n"
        "atexit.register(lambda: print(sorted(heavy & sys.modules.keys())))\n"
        "from radixkv.service.cli.main import main\n"
        "main(sys.argv[1:])"
    )
    _, out, err = launch("-P", "-c", program, *arguments)
    assert out.splitlines()[-1] == "[]"
    assert "Traceback" not in err


WITHOUT_GRPC = """
import contextlib, io, sys
sys.modules["grpc"] = None  # importing it raises
from radixkv.service.cli.main import COMMANDS, main
for name in COMMANDS:
    for arguments in (["--help"], ["--no-such-option"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                main([name, *arguments])
            except SystemExit as end:
                code = end.code
        assert code == (0 if arguments == ["--help"] else 2), (name, arguments, code)
print("done")
"""


def test_no_command_imports_grpc_for_help_or_an_argument_error():
    assert launch("-P", "-c", WITHOUT_GRPC) == (0, "done\n", "")


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    for name, help_line in COMMANDS.items():
        assert f" {name} {help_line}" in help_text


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_parsed_alike_whichever_others_are_imported(name):
    assert _help_of(make_parser({name}), name) == _help_of(make_parser(COMMANDS), name)


def _help_of(parser, name):
    (commands,) = (each for each in parser._actions if each.nargs == argparse.PARSER)
    return commands.choices[name].format_help()


def parsers():
    """Return the parsers of all commands by name."""
    parser = make_parser()
    (commands,) = (each for each in parser._actions if each.nargs == argparse.PARSER)
    return commands.choices


@pytest.mark.parametrize("command", parsers())
def test_help_says_what_every_option_does_and_its_default(command):
    parser = parsers()[command]
    help_text = " ".join(parser.format_help().split())
    assert not re.search(r"\(default: \)|\bsigterm\b|\blora\b|\bNone\b", help_text)
    for action in parser._actions:
        assert action.help, action.dest
        is_required = (
            action.required
            or not action.option_strings
            or any(group.required and action in group._group_actions for group in parser._mutually_exclusive_groups)
        )
        if is_required or action.nargs == 0:  # nargs is 0 for a flag
            continue
        text = " ".join(parser._get_formatter()._expand_help(action).split())
        assert "(default: " in text, (action.dest, text)
        if action.default not in (None, "", [], {}):
            assert str(action.default) in text.partition("(default: ")[2], (action.dest, text)
        assert text in help_text, action.dest


def test_every_command_of_a_client_finds_the_service_where_it_listens_by_default():
    for command in ("prefill", "generate", "purge", "stats", "drain"):
        assert parsers()[command].get_default("address") == "127.0.0.1:50051"


PLAN_COMMAND = (sys.executable, "-m", "radixkv.service", "plan", "--layers", "2", "--kv-heads", "2", "--head-dim", "64")


def test_a_reader_of_the_output_may_exit_early():
    reader, writer = os.pipe()
    os.close(reader)
    completed = subprocess.run(
        PLAN_COMMAND, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
    )
    os.close(writer)
    assert (completed.returncode, completed.stderr) == (1, "")


def test_output_that_can_not_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        completed = subprocess.run(
            PLAN_COMMAND, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
        )
    assert (completed.returncode, completed.stderr) == (1, "radixkv: output: no space left on the device\n")


def test_the_package_is_the_command():
    assert launch("-P", "-m", "radixkv.service", "--version") == (0, f"radixkv {__version__}\n", "")
