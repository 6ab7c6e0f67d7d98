"""A gateway runs in a `with` block and is stopped after it, and a failure to start has a reason."""

from __future__ import annotations

import platform
import sys
import urllib.request

import pytest

from bench.parts.gateway_process import GatewayProcess, num_healthy_servers
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.errors import ConfigError

pytestmark = pytest.mark.usefixtures("forked_servers")

HAS_GATEWAY = (sys.platform, platform.machine()) == ("linux", "x86_64")
needs_gateway = pytest.mark.skipif(not HAS_GATEWAY, reason="the gateway is built for Linux on x86-64 only")


@needs_gateway
def test_every_server_and_the_tokenizer_are_ready_inside_the_block() -> None:
    with ServerProcess(serve_command("tiny", "cpu", ("gateway.enabled=true", "gateway.model_name=chat"))) as address:
        gateway = GatewayProcess([address])
        with gateway as url:
            assert num_healthy_servers(url) == 1
            with urllib.request.urlopen(f"{url}/v1/models") as response:
                assert b'"chat"' in response.read()
        assert num_healthy_servers(url) == 0
        gateway.stop()  # has no effect


@needs_gateway
def test_servers_that_never_start_are_an_error_with_the_log() -> None:
    gateway = GatewayProcess(["127.0.0.1:1"], start_timeout_s=1)
    with pytest.raises(ConfigError, match=r"(?s)expected 1 healthy servers, got 0 within 1 s; its log:\n.+"), gateway:
        pass
    assert gateway._process is not None
    assert gateway._process.poll() is not None
