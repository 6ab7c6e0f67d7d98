"""Addresses of servers."""

from __future__ import annotations

import pytest

from radixkv.service.client.address import proxy_variable


def test_the_variable_with_the_proxy_of_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_variable("kv.example.org:1") == ""
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert proxy_variable("kv.example.org:1") == "http_proxy"
    assert proxy_variable("127.0.0.1:1") == "", "a loopback address needs no proxy"
    assert proxy_variable("kv.example.org:1", [("grpc.enable_http_proxy", 0)]) == ""
    monkeypatch.setenv("grpc_proxy", "http://proxy:3128")
    assert proxy_variable("kv.example.org:1") == "grpc_proxy"
    monkeypatch.setenv("no_proxy", "localhost, .example.org")
    assert proxy_variable("kv.example.org:1") == ""
