import pytest

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.service.cli.main import main
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", None),
        ("--compression h2o --compression-tokens 64", Compression(CompressionPolicy.H2O, 64)),
        (
            "--compression streaming_llm --compression-tokens 64 --compression-sinks 0",
            Compression(CompressionPolicy.STREAMING_LLM, 64, num_sinks=0),
        ),
        (
            "--compression snapkv --compression-tokens 64 --compression-window 8",
            Compression(CompressionPolicy.SNAPKV, 64, window=8),
        ),
    ],
)
def test_the_command_asks_for_it(capsys, options, expected):
    engine = FakeEngine()
    assert run_cli(capsys, engine, "generate", "--tokens", "1,2", *options.split())[0] == 0
    assert [sampling.compression for sampling in engine.samplings] == [expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--compression h2o", "--compression: expected --compression-tokens with it, got none"),
        ("--compression-window 3", "--compression-window: expected --compression with it, got none"),
        ("--compression h2o --compression-tokens 1", "compression.max_tokens: expected at least 2, got 1"),
        ("--compression h2o --compression-tokens 9 --compression-sinks 1", "compression.num_sinks: expected none"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_is_sent(capsys, options, message):
    engine = FakeEngine()
    code, _, err = run_cli(capsys, engine, "generate", "--tokens", "1,2", *options.split())
    assert code == 2
    assert message in err
    assert not engine.samplings


def test_what_makes_no_sense_is_refused_before_a_tokenizer_is_asked_for(capsys):
    call = ["generate", "--text", "a", "--address", "127.0.0.1:1", "--compression", "h2o", "--compression-tokens", "1"]
    assert main(call) == 2
    assert capsys.readouterr().err == "radixkv: compression.max_tokens: expected at least 2, got 1\n"
