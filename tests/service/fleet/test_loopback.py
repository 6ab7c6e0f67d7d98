from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from radixkv.service.fleet.ray_fleet import listen_on_loopback


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
