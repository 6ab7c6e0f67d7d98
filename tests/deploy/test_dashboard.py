"""The dashboard, the alerts and the queries of docs/METRICS.md, with a real Prometheus.

It scrapes a real server over TLS with a reader's token.
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

from .prometheus import PROMETHEUS, Prometheus, scraping
from .queries import DASHBOARD, EXAMPLES, PANELS, as_sent

QUERIES = PANELS | EXAMPLES
# Queries for which a healthy server has no series yet.
MAY_BE_EMPTY = {"Requests by outcome B", "alert: requests are refused because the queue is full"}


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def call_each(address: str, credential_files: CredentialFiles) -> None:
    for name in ("acme", "globex"):
        with Client(address, timeout_s=PATIENCE_S, **credential_files.client(name)) as client:
            client.prefill(range(200))
            client.prefill(range(200))
            list(client.generate(range(150), max_new_tokens=4, ignore_eos=True))
            with pytest.raises(grpc.RpcError):
                client.prefill([1, 512])
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
    command += [part for setting in settings for part in ("--set", setting)]
    log = (folder / "log").open("w")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("listening on ").strip()
        with scraping(folder, target, {"tls_config": {"ca_file": "ca.pem"}}) as found:
            assert found.becomes_known("radixkv_up == 1"), (folder / "prometheus.log").read_text()
            call_each(address, credential_files)
            assert found.becomes_known('count_over_time(radixkv_prompt_tokens_total{tenant="acme"}[1m]) > 1')
            call_each(address, credential_files)
            assert found.becomes_known('rate(radixkv_prompt_tokens_total{tenant="globex"}[1m]) > 0')
            yield found
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
        assert [each["value"][1] for each in result if each["value"][1] in ("+Inf", "-Inf")] == []


@pytest.mark.slow
def test_the_legend_of_a_panel_uses_existing_labels(prometheus: Prometheus) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                result = prometheus.query(as_sent(target["expr"]))
                assert all(label in each["metric"] for each in result), panel["title"]


@pytest.mark.slow
def test_the_hit_rate_of_a_tenant_is_shown(prometheus: Prometheus) -> None:
    (value,) = [
        float(each["value"][1])
        for each in prometheus.query(as_sent(QUERIES["Token hit rate by tenant A"]))
        if each["metric"]["tenant"] == "acme"
    ]
    assert 0.5 < value < 1


@pytest.mark.slow
def test_alerts_can_be_evaluated_and_none_fires_for_a_healthy_server(prometheus: Prometheus) -> None:
    assert prometheus.becomes_known("ALERTS or vector(1)")
    rules = prometheus.rules()
    assert set(rules.values()) == {"ok"}, rules
    assert prometheus.query('ALERTS{alertstate="firing"}') == []
