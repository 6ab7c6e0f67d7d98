"""Statements of real servers: the numbers of requests, restarts, and a directory that only one server may use."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from radixkv.service.client import Client
from radixkv.v1.cache_pb2 import StatementLine
from tests.patience import PATIENCE_S
from tests.whole.forked_server import serving


@contextmanager
def run_server(directory: Path, interval_s: float, *settings: str, log: Path) -> Iterator[tuple[Client, object]]:
    """Run a server that saves statements in a directory; yield a client and the process."""
    all_settings = (
        f"server.statement_path={directory}",
        f"server.statement_interval_s={interval_s}",
        *settings,
    )
    options = [argument for setting in all_settings for argument in ("--set", setting)]
    with serving(*options, log=log) as (process, address), Client(address, timeout_s=PATIENCE_S) as client:
        yield client, process


def line_of(client: Client, tenant: str) -> StatementLine:
    """Return the line of a tenant in the statement; an empty one if it has none."""
    lines = client.statement(tenant=tenant).lines
    assert len(lines) <= 1
    return lines[0] if lines else StatementLine()


def test_numbers_are_those_of_the_responses_and_survive_a_restart(tmp_path: Path) -> None:
    prompt = list(range(100, 350))
    with run_server(tmp_path / "s", 3600, "tiers.host_bytes=100000000", log=tmp_path / "log") as (client, _):
        usages = [client.prefill(prompt, tenant="acme").usage for _ in range(3)]
        client.prefill(prompt, tenant="globex")
        time.sleep(0.05)  # during which the cached tokens are counted
        line = line_of(client, "acme")
        assert line.requests == 3
        assert line.computed_tokens == sum(each.computed_tokens for each in usages) == 250 + 1 + 1
        assert line.device_hit_tokens == sum(each.cached_tokens for each in usages)
        assert line.written_tokens == sum(each.written_tokens for each in usages)
        assert line.device_token_s > 0
        by_tenant = {each.tenant: each for each in client.statement().lines}
        assert set(by_tenant) == {"acme", "globex"}
        generated = sum(len(each.token_ids) for each in client.generate(prompt, max_new_tokens=7, tenant="globex"))
        assert line_of(client, "globex").generated_tokens == generated == 7
        cached_blocks = client.stats(tenant="acme").tenants[0].cached_blocks
        block_size = client.stats().block_size
        start_s, token_s_before = time.monotonic(), line_of(client, "acme").device_token_s
        time.sleep(0.5)
        new_token_s = line_of(client, "acme").device_token_s - token_s_before
        elapsed_s = time.monotonic() - start_s
        assert 0 < new_token_s <= cached_blocks * block_size * elapsed_s
        last_line = line_of(client, "acme")
    with run_server(tmp_path / "s", 3600, log=tmp_path / "log") as (client, _):
        line = line_of(client, "acme")
        assert (line.requests, line.computed_tokens) == (last_line.requests, last_line.computed_tokens)
        assert line.device_token_s >= last_line.device_token_s, "tokens were cached until the first server ended"
        client.prefill(prompt, tenant="acme")
        assert line_of(client, "acme").requests == 4


def test_a_server_that_is_killed_loses_only_what_was_used_since_the_last_save(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    with run_server(directory, 1, log=tmp_path / "log") as (client, process):
        client.prefill(range(100), tenant="acme")
        deadline_s = time.monotonic() + PATIENCE_S
        while not any('"requests": 1' in each.read_text() for each in directory.glob("*.json")):
            assert time.monotonic() < deadline_s, "the statement was not saved"
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    with run_server(directory, 1, log=tmp_path / "log") as (
        client,
        _,
    ):  # the lock on the directory ended with the process
        assert line_of(client, "acme").requests == 1


def test_a_statement_shows_that_twice_the_ceiling_would_have_had_more_hits(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    ceiling = ("tenants.acme.ceiling_tokens=256", "cache.block_size=16")
    prompts = [range(start, start + 150) for start in (0, 300)]
    with run_server(directory, 3600, *ceiling, log=tmp_path / "log") as (client, _):
        computed = [client.prefill(prompt, tenant="acme").usage.computed_tokens for prompt in 3 * prompts]
        for prompt in prompts:
            client.prefill(prompt, tenant="globex")
        assert line_of(client, "globex").more_hit_tokens_at_twice_ceiling == 0
        assert sum(computed) > 4 * 100, "the ceiling of 256 tokens has no room for both prompts"
    with run_server(directory, 3600, *ceiling, log=tmp_path / "log") as (
        client,
        _,
    ):  # all requests were replayed before the first server ended
        assert line_of(client, "acme").more_hit_tokens_at_twice_ceiling > 0


def test_a_damaged_file_does_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    directory, log = tmp_path / "s", tmp_path / "log"
    with run_server(directory, 3600, log=log) as (client, _):
        client.prefill(range(100), tenant="acme")
    for path in directory.glob("*.json"):
        path.write_text("{")
    with run_server(directory, 3600, log=log) as (client, _):
        assert not client.statement().lines
    assert "is damaged" in log.read_text()
    assert list(directory.glob("*.json.damaged"))


def test_a_second_server_with_the_directory_of_another_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "second"
    with run_server(tmp_path / "s", 3600, log=tmp_path / "log"):  # noqa: SIM117 - the second server fails
        with pytest.raises(AssertionError), run_server(tmp_path / "s", 3600, log=log):
            pass
    assert "server.statement_path: another process uses" in log.read_text()
