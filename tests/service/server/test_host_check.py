"""The hosts that a request to the metrics port may name."""

from __future__ import annotations

import http.client
import threading

import pytest

from radixkv.config import Config, ServerConfig
from radixkv.service.server.host_check import HostCheck
from radixkv.service.server.metrics_port import OPEN_PATHS, Telemetry
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine

OF_THIS_MACHINE = (
    "localhost",
    "localhost:9400",
    "LocalHost.",
    "127.0.0.1",
    "127.0.0.1:9400",
    "127.8.9.1",
    "[::1]:9400",
)
ADDRESSES = ("10.1.2.3:9400", "10.1.2.3", "[fe80::1]:9400", "0.0.0.0:9400")
NAMES = ("evil.example", "evil.example:9400", "localhost.evil.example", "radixkv:9400", "127.0.0.1.evil.example")
MALFORMED = (
    "",
    " ",
    "localhost,evil.example",
    "evil.example@localhost",
    "[::1",
    "::1",
    "localhost:port",
    "127.0.0.1:1:2",
    "[]",
)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_on_loopback_only_names_of_this_machine_are_allowed(host: str) -> None:
    check = HostCheck(ServerConfig(host=host))
    assert all(check.allows(each) for each in OF_THIS_MACHINE)
    assert not any(check.allows(each) for each in (*ADDRESSES, *NAMES, *MALFORMED))
    assert check.allows(None)


def test_further_names_can_be_configured() -> None:
    check = HostCheck(ServerConfig(metrics_hosts="radixkv, Metrics.example,"))
    assert all(check.allows(each) for each in (*OF_THIS_MACHINE, "RADIXKV:9400", "metrics.example"))
    assert not check.allows("evil.example")
    assert not check.allows("10.1.2.3")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3"])
def test_on_a_network_probes_by_address_are_always_allowed(host: str) -> None:
    for check in (HostCheck(ServerConfig(host=host)), HostCheck(ServerConfig(host=host, metrics_hosts="radixkv"))):
        assert all(check.allows(each) for each in (*OF_THIS_MACHINE, *ADDRESSES, "radixkv:9400"))
        assert not any(check.allows(each) for each in MALFORMED)
    assert not check.allows("evil.example")


@pytest.mark.parametrize("path", [*OPEN_PATHS, "/metrics", "/state.json", "/nothing"])
def test_requests_that_name_another_host_are_refused_on_every_path(path: str) -> None:
    telemetry = Telemetry(Config.load(settings=["server.metrics_port=0"]))
    with telemetry.serving(FakeEngine()) as address:
        assert address is not None
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        connection.request("GET", path, headers={"Host": "evil.example"})
        response = connection.getresponse()
        assert response.status == 421
        assert b"server.metrics_hosts allows more names" in response.read()
        connection.close()


def test_a_thread_that_can_not_be_started_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = Telemetry(Config.load(settings=["server.metrics_port=0"]))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if "process_request_thread" in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with telemetry.serving(FakeEngine()) as address:
        assert address is not None
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(70):  # more than there are slots
                connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
                connection.request("GET", "/healthz")
                with pytest.raises(ConnectionError):
                    connection.getresponse()
                connection.close()
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
