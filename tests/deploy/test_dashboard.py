"""The dashboard, the alerts and the queries of docs/METRICS.md, with a real Prometheus.

Prometheus scrapes a real server over TLS with the token of a caller that may only read.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from radixkv.service.client import Client
from tests.free_port import free_port
from tests.patience import PATIENCE_S
from tests.service.server.auth.certificates import TOKENS, CredentialFiles

from .prometheus import PROMETHEUS, Prometheus, run_prometheus
from .queries import DASHBOARD, EXAMPLES, PANELS, as_sent

QUERIES = PANELS | EXAMPLES
# Queries for which a healthy server has no series yet.
MAY_BE_EMPTY = {"Requests by outcome B", "alert: requests are refused because the queue is full"}


def test_panels_do_not_overlap() -> None:
    positions = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for position in positions
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells), "the grid of Grafana has 24 columns"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(positions)


def make_calls(address: str, credential_files: CredentialFiles) -> None:
    """Make calls of two tenants, one of them invalid per tenant, and a call that its caller is not allowed to make."""
    for name in ("acme", "globex"):
        with Client(address, timeout_s=PATIENCE_S, **credential_files.client(name)) as client:
            client.prefill(range(200))
            client.prefill(range(200))
            list(client.generate(range(150), max_new_tokens=4, ignore_eos=True))
            with pytest.raises(grpc.RpcError):
                client.prefill([1, 512])  # the vocabulary of the embedded model has the tokens 0 to 511
    with (
        Client(address, timeout_s=PATIENCE_S, **credential_files.client("watcher")) as client,
        pytest.raises(grpc.RpcError),
    ):
        client.prefill([1])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a server before and after some calls."""
    if PROMETHEUS is None:
        pytest.skip("needs Prometheus' binary: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    credential_files = CredentialFiles(folder)
    (folder / "reader.token").write_text(TOKENS["watcher"] + "\n")
    target = f"127.0.0.1:{free_port()}"
    settings = [f"server.{key}={json.dumps(value)}" for key, value in credential_files.tls.items()] + [
        "tiers.host_bytes=10000000"
    ]
    command = [sys.executable, "-m", "radixkv.service", "serve", "--port", "0", "--metrics-port", target.split(":")[1]]
    command += [argument for setting in settings for argument in ("--set", setting)]
    log = (folder / "log").open("w")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("listening on ").strip()
        with run_prometheus(folder, target, {"tls_config": {"ca_file": "ca.pem"}}) as scraper:
            assert scraper.wait_for_result("radixkv_up == 1"), (folder / "prometheus.log").read_text()
            make_calls(address, credential_files)
            assert scraper.wait_for_result('count_over_time(radixkv_prompt_tokens_total{tenant="acme"}[1m]) > 1')
            make_calls(address, credential_files)
            assert scraper.wait_for_result('rate(radixkv_prompt_tokens_total{tenant="globex"}[1m]) > 0')
            yield scraper
    finally:
        server.terminate()
        server.communicate(timeout=PATIENCE_S)
        log.close()


@pytest.mark.slow
@pytest.mark.parametrize("title", QUERIES)
def test_a_query_has_a_result(prometheus: Prometheus, title: str) -> None:
    result = prometheus.query(as_sent(QUERIES[title]))
    if title not in MAY_BE_EMPTY:
        assert result, QUERIES[title]
        assert not {each["value"][1] for each in result} & {"+Inf", "-Inf"}


@pytest.mark.slow
def test_the_legend_of_a_panel_uses_existing_labels(prometheus: Prometheus) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                result = prometheus.query(as_sent(target["expr"]))
                assert all(label in each["metric"] for each in result), panel["title"]


@pytest.mark.slow
def test_the_hit_rate_of_a_tenant_is_shown(prometheus: Prometheus) -> None:
    (hit_rate,) = [
        float(each["value"][1])
        for each in prometheus.query(as_sent(QUERIES["Token hit rate by tenant A"]))
        if each["metric"]["tenant"] == "acme"
    ]
    # Each tenant sends one prompt that is computed; its later prompts are cached except for their last token.
    assert 0.5 < hit_rate < 1


@pytest.mark.slow
def test_alerts_can_be_evaluated_and_none_fires_for_a_healthy_server(prometheus: Prometheus) -> None:
    assert prometheus.wait_for_result("ALERTS or vector(1)")
    rules = prometheus.rules()
    assert set(rules.values()) == {"ok"}, rules
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
