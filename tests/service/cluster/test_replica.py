from __future__ import annotations

from types import SimpleNamespace

import pytest

from radixkv.config import ServerConfig
from radixkv.service.cluster.replica import CALLS, ReplicasForLoad, replica_server


def test_a_replica_listens_without_tls_and_other_ports() -> None:
    config = ServerConfig(
        host="10.0.0.1", port=7, admin_port=8, metrics_port=9, tls_certificate="c", tls_key="k", tokens_file="t"
    )
    assert replica_server(config, "127.0.0.1") == ServerConfig(host="127.0.0.1", port=0, tokens_file="t")


@pytest.mark.parametrize(
    ("calls", "expected"), [({}, 2), ({"a": 3.0, "b": 2.0}, 2), ({"a": 16.0, "b": 8.5}, 4), ({"a": 1000.0}, 6)]
)
def test_a_fleet_grows_by_its_calls(calls, expected) -> None:
    context = SimpleNamespace(
        aggregated_metrics={CALLS: calls} if calls else None,
        capacity_adjusted_min_replicas=2,
        capacity_adjusted_max_replicas=6,
    )
    assert ReplicasForLoad(8.0)(context) == (expected, {})
