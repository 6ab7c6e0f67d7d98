import asyncio

import pytest

from radixkv.errors import InvalidRequest, QueueFull
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_text import GrammarText
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S

LIMIT_S = 10.0
MADE = "made"  # stands in for a compiled constraint


@pytest.fixture
def clock():
    return FakeClock(100.0)


@pytest.fixture
def compilation(clock):
    return Compilation(GrammarText("regex", "regex", "a+"), clock)


def constraint(compilation, limit_s=LIMIT_S):
    return asyncio.run(compilation.constraint(limit_s))


def test_a_result_is_returned_to_each_call_however_late(compilation, clock):
    compilation.begin()
    compilation.end(MADE)
    clock.now_s += 1000 * LIMIT_S
    assert [constraint(compilation) for _ in range(2)] == [MADE, MADE]
    assert compilation.is_over


def test_waiting_calls_return_when_the_compilation_ends(compilation):
    async def ask():
        waiters = [asyncio.create_task(compilation.constraint(PATIENCE_S)) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        await asyncio.to_thread(compilation.begin)
        await asyncio.to_thread(compilation.end, MADE)
        return await asyncio.gather(*waiters, return_exceptions=True)

    cancelled, *others = asyncio.run(ask())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert others == [MADE, MADE]


def test_an_error_is_raised_each_time_and_its_traceback_does_not_grow(compilation):
    compilation.begin()
    compilation.end(InvalidRequest("regex: expected another one"))
    lengths = set()
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="expected another one") as raised:
            constraint(compilation)
        lengths.add(len(raised.traceback))
    assert len(lengths) == 1


def test_a_grammar_that_stays_queued_is_refused_as_queue_full(compilation):
    with pytest.raises(QueueFull, match=r"^regex: other grammars were compiled for 0.01 s; try again later$"):
        constraint(compilation, 0.01)
    assert not compilation.is_over


def test_the_time_to_compile_counts_from_its_beginning(compilation, clock, monkeypatch):
    waits_s = []

    async def wait(_, timeout):
        waits_s.append(timeout)

    monkeypatch.setattr(asyncio, "wait", wait)
    compilation.begin()
    clock.now_s += 7.0
    with pytest.raises(InvalidRequest, match=r"^regex: compiling it takes more than 10 s"):
        constraint(compilation)
    assert waits_s == [LIMIT_S - 7.0]
