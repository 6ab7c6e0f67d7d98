from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from radixkv.errors import InvalidCredential, InvariantViolation
from radixkv.service.server.auth import revocation
from radixkv.service.server.auth.revocation import Revocation
from tests.patience import PATIENCE_S


class Credential:
    """A credential that can be revoked, and counts how often it is checked."""

    def __init__(self) -> None:
        self.is_revoked = False
        self.num_checks = 0

    def require_valid(self) -> None:
        self.num_checks += 1
        if self.is_revoked:
            raise InvalidCredential("authorization: expected a token of this service, got another")

    async def wait_for_checks(self) -> None:
        """Wait for two more checks. If the credential is revoked, wait for one, because a refusal is the last check."""
        num_expected = self.num_checks + (1 if self.is_revoked else 2)
        while self.num_checks < num_expected:
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def checks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation, "PERIOD_S", 0.001)


async def responses_of(credential: Credential, wait: Callable[[], asyncio.Future[None]]) -> AsyncGenerator[int, None]:
    async with Revocation(credential.require_valid) as watched:
        for number in range(3):
            watched.begin_write()
            yield number
            watched.end_write()
            await wait()


def run(test: Callable[[], object]) -> None:
    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))  # type: ignore[arg-type]


def test_a_stream_that_waits_is_interrupted() -> None:
    async def test() -> None:
        credential = Credential()
        responses = responses_of(credential, lambda: asyncio.get_running_loop().create_future())
        assert await anext(responses) == 0
        waiting = asyncio.ensure_future(anext(responses))
        await credential.wait_for_checks()
        assert not waiting.done()
        credential.is_revoked = True
        with pytest.raises(InvalidCredential):
            await waiting

    run(test)


def test_a_write_of_grpc_is_not_interrupted_and_the_refusal_follows_it() -> None:
    async def test() -> None:
        credential = Credential()
        responses = responses_of(credential, lambda: asyncio.sleep(0))  # type: ignore[arg-type,return-value]
        assert await anext(responses) == 0
        credential.is_revoked = True
        await credential.wait_for_checks()  # gRPC is still writing, and no CancelledError may interrupt that
        with pytest.raises(InvalidCredential):
            await anext(responses)

    run(test)


def test_a_stream_that_is_closed_during_a_write_raises_nothing() -> None:
    async def test() -> None:
        credential = Credential()
        responses = responses_of(credential, lambda: asyncio.get_running_loop().create_future())
        assert await anext(responses) == 0
        credential.is_revoked = True
        await credential.wait_for_checks()
        await responses.aclose()
        num_checks = credential.num_checks
        await asyncio.sleep(0.01)
        assert credential.num_checks == num_checks

    run(test)


def test_other_errors_and_cancellations_pass() -> None:
    async def test() -> None:
        with pytest.raises(InvariantViolation):
            async with Revocation(Credential().require_valid):
                raise InvariantViolation("other")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01), Revocation(Credential().require_valid):
                await asyncio.get_running_loop().create_future()
        async with Revocation(None) as unwatched:
            unwatched.begin_write()
            unwatched.end_write()

    run(test)
