import importlib.util
import logging
import socket
from types import SimpleNamespace

import pytest

from radixkv.config import EventsConfig
from radixkv.errors import ConfigError
from radixkv.service.server.event_publishing import publishing, require_publishable
from tests.events.fake_source import FakeSource

ANYWHERE = "tcp://127.0.0.1:*"


def test_a_missing_package_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "msgpack" else find_spec(name))
    require_publishable(EventsConfig())
    with pytest.raises(ConfigError, match=r"^events.zmq_endpoint: the package msgpack is missing.*\.\[events\]"):
        require_publishable(EventsConfig(zmq_endpoint=ANYWHERE))


def test_a_replay_endpoint_requires_an_endpoint():
    with pytest.raises(ConfigError, match=r"^events\.replay_endpoint: requires events\.zmq_endpoint"):
        require_publishable(EventsConfig(replay_endpoint=ANYWHERE))


def test_nothing_is_recorded_without_an_endpoint():
    source = FakeSource()
    with publishing(SimpleNamespace(events=source), EventsConfig()):
        source.store(1, 2, 3, 4)
    assert source.log.num_batches == 0


def test_events_are_recorded_and_published_inside_the_context(caplog):
    source = FakeSource()
    with (
        caplog.at_level(logging.INFO),
        publishing(SimpleNamespace(events=source), EventsConfig(zmq_endpoint=ANYWHERE, replay_endpoint=ANYWHERE)),
    ):
        source.store(1, 2, 3, 4)
    assert source.log.num_batches == 1
    assert caplog.text.count("tcp://127.0.0.1:") == 2


def test_an_address_that_can_not_be_bound_is_refused():
    with (
        pytest.raises(ConfigError, match=r"^events\.zmq_endpoint: expected"),
        publishing(SimpleNamespace(events=FakeSource()), EventsConfig(zmq_endpoint="nowhere")),
    ):
        pass


@pytest.mark.parametrize("key", ["zmq_endpoint", "replay_endpoint"])
def test_addresses_are_tried_before_a_model_is_loaded_and_are_free_after_it(key):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for endpoint in ("nope", taken):
            with pytest.raises(ConfigError, match=rf"^events\.{key}: expected a ZMQ address that can be bound"):
                require_publishable(EventsConfig(**{"zmq_endpoint": ANYWHERE, key: endpoint}))
    config = EventsConfig(**{"zmq_endpoint": ANYWHERE, key: taken})
    require_publishable(config)
    with publishing(SimpleNamespace(events=FakeSource()), config):
        pass


ADDRESSES_OF_THIS_MACHINE = (
    "tcp://127.0.0.1:*",
    "tcp://127.0.0.2:*",
    "tcp://localhost:*",
    "ipc:///tmp/radixkv-test-events",
)
ADDRESSES_OF_ALL_INTERFACES = (
    "tcp://*:*",
    "tcp://0.0.0.0:*",
    "tcp://0:*",
    "tcp://[::]:*",
    "tcp://0x0:*",
    "tcp://[::ffff:0.0.0.0]:*",
)


@pytest.mark.parametrize("key", ["zmq_endpoint", "replay_endpoint"])
@pytest.mark.parametrize("endpoint", ADDRESSES_OF_ALL_INTERFACES)
def test_addresses_that_other_machines_reach_require_insecure(key, endpoint, caplog):
    config = EventsConfig(**{"zmq_endpoint": ANYWHERE, key: endpoint})
    with pytest.raises(ConfigError, match=rf"^events\.{key}: expected an address of this machine.* got .*--insecure"):
        require_publishable(config)
    require_publishable(config, is_insecure=True)
    assert f"anyone who can connect to {endpoint} may read the prompts" in caplog.text


def test_a_host_name_counts_as_what_it_resolves_to(monkeypatch):
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *arguments, **options: resolve(host.replace("mine", "0.0.0.0"), *arguments, **options),
    )
    with pytest.raises(ConfigError, match=r"^events\.zmq_endpoint: expected an address of this machine"):
        require_publishable(EventsConfig(zmq_endpoint="tcp://mine:*"))


@pytest.mark.parametrize("endpoint", ADDRESSES_OF_THIS_MACHINE)
def test_addresses_of_this_machine_require_no_key(endpoint, caplog):
    require_publishable(EventsConfig(zmq_endpoint=endpoint))
    assert not caplog.text
    require_publishable(EventsConfig(zmq_endpoint=endpoint), has_tokens=True)
    assert "there is no events.curve_key_file" in caplog.text


def test_a_key_requires_an_address():
    with pytest.raises(ConfigError, match=r"^events\.curve_key_file: requires events\.zmq_endpoint"):
        require_publishable(EventsConfig(curve_key_file="server.key_secret"))
