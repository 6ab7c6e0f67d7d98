"""The way of every call into the service, and of its answer out of it, with what is refused there counted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from radixkv.errors import RadixKVError
from radixkv.service.server.identity.gate import Gate
from radixkv.service.server.intake.intake import Intake, Parse, Received
from radixkv.service.server.unfinished_calls import Context


class Entry:
    """Admits calls, receives their messages and hands their answers over.

    Args:
        gate: says who may make a call, before its message is received.
        intake: receives messages, and notes answers.
        count_refusal: is called with each exception that is raised here; None to count nothing.

    Attributes:
        intake: see above.
    """

    def __init__(self, gate: Gate, intake: Intake, count_refusal: Callable[[RadixKVError], None] | None = None) -> None:
        self._gate = gate
        self.intake = intake
        self._count_refusal = count_refusal

    async def receive(self, method: str, parse: Parse, context: Context, *, is_endless: bool = False) -> Received:
        """Let a call begin and receive its message; see `Gate.admit` and `Intake.receive`."""
        try:
            admission = self._gate.admit(method, context)
            self.intake.begin(context, admission, is_endless=is_endless)
            return await self.intake.receive(parse, context, admission, is_endless=is_endless)
        except RadixKVError as error:
            self._count(error)
            raise

    async def receive_all(self, method: str, parse: Parse, context: Context) -> AsyncGenerator[Any, None]:
        """Let a call begin and receive its messages, one after the other; see `Intake.receive_all`."""
        try:
            self.intake.begin(context, self._gate.admit(method, context), is_endless=True)
            async with contextlib.aclosing(self.intake.receive_all(parse, context)) as messages:
                async for message in messages:
                    yield message
        except RadixKVError as error:
            self._count(error)
            raise

    def send(self, context: Context, received: Received, answer: bytes) -> bytes:
        """Note an answer that is handed to gRPC, and return it; see `Intake.send`."""
        try:
            return self.intake.send(context, received, answer)
        except RadixKVError as error:
            self._count(error)
            raise

    def _count(self, refusal: RadixKVError) -> None:
        if self._count_refusal is not None:
            self._count_refusal(refusal)
