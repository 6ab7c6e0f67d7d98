"""Clients without credentials can't fill the log through gRPC's own records."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bench.hostile.attacks.frames import RawConnection
from radixkv.service.client import AsyncClient
from radixkv.service.server.grpc_log import is_kept
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

PROBE = "/radixkv.v1.PrefillService/Probe"
HEADERS = ("authorization", "user-agent", "traceparent", "x-anything", "grpc-accept-encoding")


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "", 0, text, ("/a/b",), None)


def test_only_the_records_that_clients_cause_are_dropped() -> None:
    assert not is_kept(record("ExecuteBatchError raised in core by servicer method [%s]"))
    assert not is_kept(record("Invalid encoding on %s"))
    assert is_kept(record("Unexpected [ValueError] raised by servicer method [%s]"))


@pytest.mark.parametrize("name", HEADERS)
def test_metadata_that_is_not_utf8_is_not_logged(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> str:
        async with serving(FakeEngine()) as (_, address), AsyncClient(address) as client:
            connection = await RawConnection.open(address, 65_535)
            connection.call(PROBE, b"\x0a\x04\x01\x00\x00\x00", headers={name: b"secret \xff\xfe"})
            status = await connection.read_status(PATIENCE_S)
            connection.close()
            await client.prefill([1, 2])
            return status

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run()) in ("0", "16")  # OK; or UNAUTHENTICATED, for the header `authorization`
    assert caplog.text == ""
