from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from radixkv.config import Config
from radixkv.service.fleet import ray_fleet
from radixkv.service.fleet.ray_fleet import FleetPlan, listen_on_loopback


def test_only_the_wildcard_address_is_replaced(monkeypatch) -> None:
    bound = []
    private = ModuleType("ray.serve._private")
    private.replica = SimpleNamespace(add_port_to_grpc_server=lambda server, address: bound.append((server, address)))
    for name in ("ray", "ray.serve"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.serve._private", private)
    listen_on_loopback()
    private.replica.add_port_to_grpc_server("server", "[::]:0")
    private.replica.add_port_to_grpc_server("server", "10.0.0.1:7")
    assert bound == [("server", "127.0.0.1:0"), ("server", "10.0.0.1:7")]


@pytest.mark.parametrize(("max_replicas", "cpus", "expected"), [(3, 1.0, 3), (3, 0.5, 2), (5, 0.3, 2), (1, 1.0, 2)])
def test_ray_counts_as_many_cpus_as_all_replicas_request_and_at_least_those_of_the_machine(
    monkeypatch, max_replicas, cpus, expected
) -> None:
    monkeypatch.setattr(ray_fleet.os, "cpu_count", lambda: 2)
    plan = FleetPlan(Config(), min_replicas=1, max_replicas=max_replicas, cpus=cpus)
    assert ray_fleet._ray_options(plan)["num_cpus"] == expected
