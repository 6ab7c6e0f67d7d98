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
    """Return the chunk with the token `number`, with log probabilities if `num_top` is given."""
    logprobs = () if num_top is None else (TokenLogprobs(-float(number), ((number, -1.0),) * num_top),)
    return GeneratedTokens((number,), Usage(3, 0, 3, 0, number), logprobs, ("of the prompt",) if number == 1 else ())


class Call:
    """A call with a stream of tokens. It counts how often the stream cancels it.

    Attributes:
        held: the bytes of unsent tokens, shared with the calls that were given the same object.
    """

    def __init__(self, max_bytes=10**6, key=BUSY, held=None, turns=None):
        self.held = FairShares(max_bytes, "bytes") if held is None else held
        self.num_cancels = 0
        self.stream = TokenStream(Mailbox(), self.held, key, self.cancel, turns or StreamTurns())

    def cancel(self):
        self.num_cancels += 1

    async def receive(self, index, *chunks, put=None):
        """Put chunks of a completion into the stream, by default with `put`, and let the event loop deliver them."""
        for each in chunks:
            (put or self.stream.put)(index, each)
        await asyncio.sleep(0)


def test_tokens_that_wait_are_sent_together():
    async def run():
        call = Call()
        await call.receive(1, *(chunk_of(number, 2) for number in range(1, 5)))
        await call.receive(0, chunk_of(1))
        answers, ended = await call.stream.get()
        first, other = (call.stream.take(index) for index in answers)
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
        calls = [Call(turns=turns) for _ in range(40)]

        async def send(number):
            await calls[number].stream.get()
            sent.append((iteration, number, calls[number].stream.take(0).token_ids))

        sending = [asyncio.create_task(send(number)) for number in range(len(calls))]
        await asyncio.gather(*(call.receive(0, chunk_of(1)) for call in calls))
        while not all(task.done() for task in sending):
            if iteration == 5:  # the last stream still waits
                calls[-1].stream.put(0, chunk_of(2))
            iteration += 1
            await asyncio.sleep(0)
        return sent

    sent = asyncio.run(run())
    assert [number for _, number, _ in sent] == list(range(40))
    assert max(Counter(iteration for iteration, _, _ in sent).values()) == 1
    assert [token_ids for _, _, token_ids in sent] == [[1]] * 39 + [[1, 2]]


def test_tokens_that_arrive_while_others_are_sent_are_sent_with_them():
    async def run():
        call = Call()
        await call.receive(0, chunk_of(1))
        await call.stream.get()
        await call.receive(0, chunk_of(2))
        taken = call.stream.take(0).token_ids
        return taken, *(await call.stream.get())

    taken, answers, ended = asyncio.run(run())
    assert taken == [1, 2]
    assert (list(answers), ended) == ([], [])


def test_unsent_tokens_of_a_completion_that_ended_can_still_be_taken():
    async def run():
        call = Call()
        await call.receive(0, chunk_of(1, 0))
        call.stream.end(0, None)
        await asyncio.sleep(0)
        answers, ended = await call.stream.get()
        return list(answers), ended, call.stream.take(0), call.stream.take(0)

    answers, ended, taken, again = asyncio.run(run())
    assert (answers, ended) == ([], [0])
    assert (taken.token_ids, len(taken.logprobs)) == ([1], 1)
    assert (again.token_ids, len(again.logprobs)) == ([], 0)


def test_tokens_that_are_sent_as_a_whole_wake_no_call():
    async def run():
        call = Call()
        without_logprobs = chunk_of(3)
        await call.receive(0, chunk_of(1, 0), chunk_of(2, 0), without_logprobs, put=call.stream.keep)
        waiting = asyncio.create_task(call.stream.get())
        await asyncio.sleep(0)
        was_woken = waiting.done()
        call.stream.end(0, None)
        await waiting
        return was_woken, call.stream.take(0).token_ids

    assert asyncio.run(run()) == (False, [1, 2])


@pytest.mark.parametrize("num_top", [None, 0, 5])
def test_tokens_count_as_held_until_they_are_sent(num_top):
    async def run():
        call = Call()
        await call.receive(0, chunk_of(1, num_top), chunk_of(2, num_top))
        held = [call.held.used]
        await call.stream.get()
        call.stream.take(0)
        held.append(call.held.used)
        await call.receive(0, chunk_of(3, num_top))
        held.append(call.held.used)
        await call.stream.get()
        held.append(call.held.used)
        call.stream.close()
        return [*held, call.held.used]

    token_bytes = unsent_bytes(1, 0 if num_top is None else 1 + num_top)
    # Two tokens were received, then taken, and a third one received; the next `get` means that the first two were sent.
    assert asyncio.run(run()) == [2 * token_bytes, 2 * token_bytes, 3 * token_bytes, token_bytes, 0]


def test_only_the_call_of_a_key_that_leaves_too_much_unread_ends():
    async def run():
        call = Call(10 * unsent_bytes(1, 101))
        other = Call(key=OTHER, held=call.held)
        await other.receive(0, chunk_of(1, 100))
        await call.receive(0, *(chunk_of(number, 100) for number in range(1, 100)))
        await other.receive(0, chunk_of(2, 100))
        with pytest.raises(QueueFull, match="for this tenant"):
            await call.stream.get()
        await other.stream.get()
        held_bytes, token_ids = call.held.used, other.stream.take(0).token_ids
        call.stream.close()
        other.stream.close()
        return held_bytes, token_ids, call.num_cancels, other.num_cancels, call.held.used

    held_bytes, token_ids, num_cancels, num_other_cancels, held_bytes_at_end = asyncio.run(run())
    assert held_bytes == 2 * unsent_bytes(1, 101), "the tokens of the refused call are still held"
    assert token_ids == [1, 2]
    assert (num_cancels, num_other_cancels, held_bytes_at_end) == (1, 0, 0)


def test_tokens_after_the_end_are_not_held():
    async def run():
        call = Call()
        await call.receive(0, chunk_of(1))
        call.stream.close()
        await call.receive(0, chunk_of(2))
        return call.held.used

    assert asyncio.run(run()) == 0


def test_dropped_tokens_are_not_taken_in_part():
    async def run():
        call = Call(2 * unsent_bytes(1, 1))
        await call.receive(0, chunk_of(1, 0))
        await call.stream.get()
        await call.receive(0, *(chunk_of(number, 0) for number in range(2, 9)))
        for read_tokens in (call.stream.take, call.stream.unsent):
            with pytest.raises(QueueFull):
                read_tokens(0)
        call.stream.close()
        return call.held.used

    assert asyncio.run(run()) == 0
