"""The worker of radixkv calls a server; its second call hits the cache and gives the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.parts.peers.workers.loop import WorkerOptions
from bench.parts.peers.workers.radixkv_worker import RadixKV
from bench.parts.peers.workers.task import Task

pytestmark = pytest.mark.usefixtures("forked_servers")


def test_prompts_are_sent_to_the_server_and_hit_its_cache_the_second_time() -> None:
    engine = RadixKV(WorkerOptions(Path("tiny"), "float32", 1, "fast", Path()))
    try:
        prompts = [[index] * 40 for index in range(3)]
        first = engine.run(Task(prompts, 1, at_once=2))
        assert first.cached_tokens == [0] * 3
        second = engine.run(Task(prompts, 4, at_once=3))
        assert [ids[:1] for ids in second.token_ids] == first.token_ids
        assert all(len(ids) == 4 for ids in second.token_ids)
        assert all(cached is not None and cached >= 32 for cached in second.cached_tokens)
        assert all(0 < each <= second.wall_s for each in second.first_s)
    finally:
        engine.close()
