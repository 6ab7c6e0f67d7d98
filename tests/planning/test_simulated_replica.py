from __future__ import annotations

import numpy as np

from radixkv.api.events import BlocksRemoved, BlocksStored
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.planning.simulated_replica import Job, SimulatedReplica
from radixkv.routing.candidate import Hits
from radixkv.routing.router import Route


class World:
    """A replica of two blocks of 4 tokens that computes a token in a second."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.replica = SimulatedReplica(
            "a",
            num_blocks=2,
            block_size=4,
            policy="lru",
            probation_share=1.0,
            namespace=Namespace("m"),
            identities=Identities(),
            compute_s=1.0,
            clock=lambda: self.now_s,
        )

    def send(self, index: int, *ids: int) -> float | None:
        tokens = np.array(ids, "<u4").tobytes()
        return self.replica.send(Job(index, self.now_s, tokens, Route("a", Hits(), False, index)))


def test_requests_are_computed_one_after_the_other() -> None:
    world = World()
    assert world.send(0, 1, 2, 3, 4, 5) == 15.0
    world.now_s = 11.0
    assert world.send(1, 1, 2, 3, 4, 6, 7) is None
    world.now_s = 15.0
    job, computed_tokens, next_end_s = world.replica.end()
    assert (job.index, computed_tokens, next_end_s) == (0, 5, 17.0)  # 4 tokens are cached
    world.now_s = 17.0
    job, computed_tokens, next_end_s = world.replica.end()
    assert (job.index, computed_tokens, next_end_s) == (1, 2, None)
    assert (world.replica.computed_tokens, world.replica.cached_tokens) == (7, 4)
    assert world.replica.waits_s == [5.0, 6.0]


def test_news_are_the_events_of_the_cache() -> None:
    world = World()
    number = world.replica.number
    assert number > 0
    for index in range(2):
        world.send(index, *range(100 * index, 100 * index + 8))
        world.replica.end()
    batches = list(world.replica.news())
    assert [batch.sequence_number for batch in batches] == [number + 1, number + 2]
    assert [type(event) for batch in batches for event in batch.events] == [BlocksStored, BlocksRemoved, BlocksStored]
    assert list(world.replica.news()) == []
    assert world.replica.num_evicted_blocks == 2


def test_a_prompt_without_room_is_computed_and_not_cached() -> None:
    world = World()
    assert world.send(0, *range(9)) == 19.0
    assert world.replica.end()[1] == 9
    assert list(world.replica.news()) == []
