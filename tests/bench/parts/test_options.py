"""Invalid options are refused before anything starts, and the help states the defaults."""

from __future__ import annotations

import pytest

from bench.parts.options import parse_options

SHARED_PREFIX = ["--workload", "shared-prefix"]
TRACE = ["--workload", "mooncake", "--trace", "t.jsonl"]


def test_options_that_are_not_given_have_the_documented_defaults() -> None:
    options = parse_options(SHARED_PREFIX)
    assert (options.requests, options.prefix_tokens, options.suffix_tokens, options.groups) == (1000, 2048, 64, 1)
    assert (options.concurrency, options.rate, options.vocab_size, options.seed) == (4, None, 256, 0)
    assert (options.baseline_requests, options.baseline_seconds, options.time_limit_s) == (None, 120, None)
    assert (options.address, options.model, options.settings) == (None, None, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "other"], "invalid choice: 'other'"),
        (["--workload", "mooncake"], "--workload mooncake needs --trace FILE"),
        ([*TRACE, "--requests", "5"], "--requests is for the other workloads; a trace takes --limit"),
        ([*SHARED_PREFIX, "--trace", "t"], "--trace needs --workload mooncake"),
        ([*SHARED_PREFIX, "--limit", "5"], "--limit is for mooncake; other workloads take --requests"),
        (["--workload", "document"], "--workload document needs --tokenizer SOURCE"),
        ([*SHARED_PREFIX, "--tokenizer", "t"], "--tokenizer needs --workload document"),
        ([*SHARED_PREFIX, "--pace", "trace"], "--pace trace needs --workload mooncake"),
        ([*TRACE, "--pace", "trace", "--rate", "5"], "--rate and --pace trace exclude each other"),
        ([*TRACE, "--speedup", "2"], "--speedup needs --pace trace"),
        ([*SHARED_PREFIX, "--rate", "5", "--concurrency", "2"], "--concurrency excludes --rate"),
        ([*SHARED_PREFIX, "--no-baseline", "--baseline-requests", "2"], "--no-baseline excludes --baseline-requests"),
        ([*SHARED_PREFIX, "--address", "a:1", "--model", "m"], "--model is for a server started here"),
        ([*SHARED_PREFIX, "--address", "a:1", "--device", "cpu"], "--device is for a server started here"),
        ([*SHARED_PREFIX, "--address", "a:1", "--set", "a.b=1"], "--set is for a server started here"),
        ([*SHARED_PREFIX, "--requests", "0"], "--requests: expected at least 1, got 0"),
        ([*SHARED_PREFIX, "--requests", "x"], "--requests: invalid whole number value: 'x'"),
        ([*SHARED_PREFIX, "--suffix-tokens", "0"], "--suffix-tokens: expected at least 1, got 0"),
        ([*SHARED_PREFIX, "--rate", "-1"], "--rate: expected a positive number, got -1"),
        ([*SHARED_PREFIX, "--rate", "inf"], "--rate: expected a positive number, got inf"),
        ([*SHARED_PREFIX, "--time-limit-s", "0"], "--time-limit-s: expected a positive number, got 0"),
        ([*SHARED_PREFIX, "--time-limit-s", "inf"], "--time-limit-s: expected a positive number, got inf"),
        ([*SHARED_PREFIX, "--seed", "1073741824"], "--seed: expected 0 to 1073741823, got 1073741824"),
        ([*SHARED_PREFIX, "--json", "/nowhere/at/all.json"], "expected a directory, got none at /nowhere/at"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
