"""Tokens for a slow reader: how many are buffered, and what happens when there are too many."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from radixkv.api.result import GeneratedTokens, TokenLogprobs, Usage
from radixkv.errors import QueueFull
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.receive.fair_shares import FairShares, QuotaKey
from radixkv.service.server.receive.response_bytes import unsent_bytes
from radixkv.service.server.servicers.stream_turns import StreamTurns
from radixkv.service.server.servicers.token_stream import TokenStream

BUSY, OTHER = QuotaKey.of_tenant("busy"), QuotaKey.of_tenant("other")


def chunk_of(number, num_top=None):
    logprobs = () if num_top is None else (TokenLogprobs(-float(number), ((number, -1.0),) * num_top),)
    return GeneratedTokens((number,), Usage(3, 0, 3, 0, number), logprobs, ("of the prompt",) if number == 1 else ())


class Line:
    """A stream whose tokens come at once."""

    def __init__(self, most_bytes=10**6, account=BUSY, held=None, turns=None):
        self.held = FairShares(most_bytes, "bytes") if held is None else held
        self.num_cancels = 0
        self.stream = TokenStream(Mailbox(), self.held, account, self.cancel, turns or StreamTurns())

    def cancel(self):
        self.num_cancels += 1

    async def receive(self, index, *chunks, put=None):
        for each in chunks:
            (put or self.stream.put)(index, each)
        await asyncio.sleep(0)


def test_tokens_that_wait_are_sent_together():
    async def run():
        line = Line()
        await line.receive(1, *(chunk_of(number, 2) for number in range(1, 5)))
        await line.receive(0, chunk_of(1))
        answers, ended = await line.stream.get()
        first, other = (line.stream.take(index) for index in answers)
        return list(answers), ended, first, other

    answers, ended, first, other = asyncio.run(run())
    assert (answers, ended) == ([1, 0], [])
    assert first.token_ids == [1, 2, 3, 4]
    assert first.logprobs == tuple(TokenLogprobs(-float(n), ((n, -1.0),) * 2) for n in range(1, 5))
    assert (first.first_usage.generated_tokens, first.last_usage.generated_tokens) == (1, 4)
    assert first.prompt_logprobs == ("of the prompt",)
    assert (other.token_ids, other.logprobs) == ([1], ())


def test_of_many_streams_with_tokens_one_sends_in_each_iteration_of_the_event_loop():
    async def run():
        turns, iteration, sent = StreamTurns(), 0, []
        lines = [Line(turns=turns) for _ in range(40)]

        async def send(number):
            await lines[number].stream.get()
            sent.append((iteration, number, lines[number].stream.take(0).token_ids))

        sending = [asyncio.create_task(send(number)) for number in range(len(lines))]
        await asyncio.gather(*(line.receive(0, chunk_of(1)) for line in lines))
        while not all(task.done() for task in sending):
            if iteration == 5:  # the last stream still waits
                lines[-1].stream.put(0, chunk_of(2))
            iteration += 1
            await asyncio.sleep(0)
        return sent

    sent = asyncio.run(run())
    assert [number for _, number, _ in sent] == list(range(40))
    assert max(Counter(iteration for iteration, _, _ in sent).values()) == 1
    assert [token_ids for _, _, token_ids in sent] == [[1]] * 39 + [[1, 2]]


def test_tokens_that_arrive_while_others_are_sent_are_sent_with_them():
    async def run():
        line = Line()
        await line.receive(0, chunk_of(1))
        await line.stream.get()
        await line.receive(0, chunk_of(2))
        taken = line.stream.take(0).token_ids
        return taken, *(await line.stream.get())

    taken, answers, ended = asyncio.run(run())
    assert taken == [1, 2]
    assert (list(answers), ended) == ([], [])


def test_unsent_tokens_of_a_completion_that_ended_can_still_be_taken():
    async def run():
        line = Line()
        await line.receive(0, chunk_of(1, 0))
        line.stream.end(0, None)
        await asyncio.sleep(0)
        answers, ended = await line.stream.get()
        return list(answers), ended, line.stream.take(0), line.stream.take(0)

    answers, ended, taken, again = asyncio.run(run())
    assert (answers, ended) == ([], [0])
    assert (taken.token_ids, len(taken.logprobs)) == ([1], 1)
    assert (again.token_ids, len(again.logprobs)) == ([], 0)


def test_tokens_that_are_sent_as_a_whole_wake_no_call():
    async def run():
        line = Line()
        without_logprobs = chunk_of(3)
        await line.receive(0, chunk_of(1, 0), chunk_of(2, 0), without_logprobs, put=line.stream.keep)
        waiting = asyncio.create_task(line.stream.get())
        await asyncio.sleep(0)
        was_woken = waiting.done()
        line.stream.end(0, None)
        await waiting
        return was_woken, line.stream.take(0).token_ids

    assert asyncio.run(run()) == (False, [1, 2])


@pytest.mark.parametrize("num_top", [None, 0, 5])
def test_tokens_count_as_held_until_they_are_sent(num_top):
    async def run():
        line = Line()
        await line.receive(0, chunk_of(1, num_top), chunk_of(2, num_top))
        held = [line.held.used]
        await line.stream.get()
        line.stream.take(0)
        held.append(line.held.used)
        await line.receive(0, chunk_of(3, num_top))
        held.append(line.held.used)
        await line.stream.get()
        held.append(line.held.used)
        line.stream.close()
        return [*held, line.held.used]

    one = unsent_bytes(1, 0 if num_top is None else 1 + num_top)
    assert asyncio.run(run()) == [2 * one, 2 * one, 3 * one, one, 0]


def test_only_the_call_of_a_key_that_leaves_too_much_unread_ends():
    async def run():
        line = Line(10 * unsent_bytes(1, 101))
        other = Line(account=OTHER, held=line.held)
        await other.receive(0, chunk_of(1, 100))
        await line.receive(0, *(chunk_of(number, 100) for number in range(1, 100)))
        await other.receive(0, chunk_of(2, 100))
        with pytest.raises(QueueFull, match="for this tenant"):
            await line.stream.get()
        await other.stream.get()
        held, token_ids = line.held.used, other.stream.take(0).token_ids
        line.stream.close()
        other.stream.close()
        return held, token_ids, line.num_cancels, other.num_cancels, line.held.used

    held, token_ids, num_cancels, num_other_cancels, left = asyncio.run(run())
    assert held == 2 * unsent_bytes(1, 101), "what was refused is dropped"
    assert token_ids == [1, 2]
    assert (num_cancels, num_other_cancels, left) == (1, 0, 0)


def test_tokens_after_the_end_are_not_held():
    async def run():
        line = Line()
        await line.receive(0, chunk_of(1))
        line.stream.close()
        await line.receive(0, chunk_of(2))
        return line.held.used

    assert asyncio.run(run()) == 0


def test_dropped_tokens_are_not_taken_in_part():
    async def run():
        line = Line(2 * unsent_bytes(1, 1))
        await line.receive(0, chunk_of(1, 0))
        await line.stream.get()
        await line.receive(0, *(chunk_of(number, 0) for number in range(2, 9)))
        for look in (line.stream.take, line.stream.unsent):
            with pytest.raises(QueueFull):
                look(0)
        line.stream.close()
        return line.held.used

    assert asyncio.run(run()) == 0
