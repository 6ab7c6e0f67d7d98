from __future__ import annotations

from types import SimpleNamespace

import pytest

from radixkv.config import Config, FleetConfig, ServerConfig
from radixkv.service.fleet.replica import CALLS, ReplicasForLoad, replica_server

TLS = {"tls_certificate": "c", "tls_key": "k"}
# Bounds of a replica: four times the default number of calls, and the default `max_deadline_s` and a minute.
REPLICA_BOUNDS = {"max_calls": 4 * 8192, "max_connection_calls": 4 * 8192, "send_timeout_s": 3660.0}
SERVER = ServerConfig(host="10.0.0.1", port=7, admin_port=8, metrics_port=9, client_ca="a", tokens_file="t", **TLS)


def test_a_replica_listens_without_tls_and_other_ports() -> None:
    replica = replica_server(Config(server=SERVER), "127.0.0.1")
    assert replica == ServerConfig(host="127.0.0.1", port=0, tokens_file="t", **REPLICA_BOUNDS)


def test_a_replica_has_tls_if_the_ingress_knows_its_authorities() -> None:
    config = Config(server=SERVER, fleet=FleetConfig(tls_ca="ca"))
    assert replica_server(config, "10.0.0.2") == ServerConfig(
        host="10.0.0.2", port=0, tokens_file="t", **TLS, **REPLICA_BOUNDS
    )


@pytest.mark.parametrize("max_calls", [1, 20, 2**31 - 1])
def test_a_replica_accepts_on_one_connection_what_the_ingress_accepts_from_all_callers(max_calls) -> None:
    replica = replica_server(Config(server=ServerConfig(max_calls=max_calls)), "127.0.0.1")
    assert min(replica.max_calls, replica.max_connection_calls) >= min(2 * max_calls + 1, 2**31 - 1)


@pytest.mark.parametrize("max_deadline_s", [1.0, 3600.0, 366 * 24 * 3600.0])
def test_an_answer_of_a_replica_may_be_unread_until_its_call_ends(max_deadline_s) -> None:
    server = ServerConfig(max_deadline_s=max_deadline_s, send_timeout_s=0.2)
    assert replica_server(Config(server=server), "127.0.0.1").send_timeout_s >= max_deadline_s


@pytest.mark.parametrize(
    ("calls", "num_replicas"), [({}, 2), ({"a": 3.0, "b": 2.0}, 2), ({"a": 16.0, "b": 8.5}, 4), ({"a": 1000.0}, 6)]
)
def test_a_fleet_has_a_replica_per_8_calls_within_its_bounds(calls, num_replicas) -> None:
    context = SimpleNamespace(
        aggregated_metrics={CALLS: calls} if calls else None,
        capacity_adjusted_min_replicas=2,
        capacity_adjusted_max_replicas=6,
    )
    assert ReplicasForLoad(8.0)(context) == (num_replicas, {})
