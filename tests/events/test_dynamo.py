"""Dynamo's router reads our events over ZMQ and sends each prompt to the server that has it cached."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import numpy as np
import pytest

from radixkv.config import EventsConfig
from radixkv.events.zmq_publisher import ZmqPublisher
from radixkv.namespace import Namespace
from tests.events.fake_source import BASE, BLOCK_SIZE, SALTED, FakeSource
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.long

os.environ.setdefault("DYN_LOG", "error")  # Dynamo reads it when it is imported
dynamo = pytest.importorskip("dynamo.llm")

NUM_WORKERS = 4
MODEL = "tiny"
PROMPT_BLOCKS = 8
PROMPTS = np.random.default_rng(0).integers(1000, 2**31, (100, PROMPT_BLOCKS * BLOCK_SIZE)).tolist()
SALTED_PROMPTS = np.random.default_rng(1).integers(1000, 2**31, (20, PROMPT_BLOCKS * BLOCK_SIZE)).tolist()


async def count_known_blocks(router: Any, prompt: list[int], salt: str | None = None) -> dict[int, int]:
    """Return how many blocks of a prompt each worker holds, as far as the router knows, by the worker's id."""
    request = {"model_name": MODEL, "token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
    scores = await router.overlap_scores(request)
    return {worker["worker_id"]: worker["device_blocks"] for worker in scores["workers"]}


async def wait_for(router: Any, worker: int, prompt: list[int], num_blocks: int, salt: str | None = None) -> None:
    """Wait until the router knows that a worker holds exactly the first `num_blocks` blocks of a prompt."""
    async with asyncio.timeout(PATIENCE_S):
        while (await count_known_blocks(router, prompt, salt))[worker] != num_blocks:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def router_and_sources(form: str) -> Any:
    """Yield a router, and the sources whose events it receives. It has received an event of each of them."""
    router = dynamo.SelectionService(indexer_threads=1)
    sources = [FakeSource(max_batches=1000) for _ in range(NUM_WORKERS)]
    with contextlib.ExitStack() as stack:
        stack.callback(router.shutdown)
        for worker, source in enumerate(sources):
            config = EventsConfig("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", form=form, block_size=BLOCK_SIZE)
            publisher = stack.enter_context(contextlib.closing(ZmqPublisher(source, config)))
            await router.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": MODEL,
                    "endpoint": f"http://127.0.0.1:{worker + 1}",
                    "block_size": BLOCK_SIZE,
                    "kv_events_endpoint": publisher.endpoint,
                    "replay_endpoint": publisher.replay_endpoint,
                    "max_num_batched_tokens": 512,
                    "total_kv_blocks": 4096,
                }
            )
        async with asyncio.timeout(PATIENCE_S):
            for worker, source in enumerate(sources):
                token = num_known_blocks = 0
                while not num_known_blocks:  # a subscription takes effect later, and misses what was stored before
                    token += 1
                    source.store(worker, token, 0, 0)
                    await asyncio.sleep(0.02)
                    num_known_blocks = (await count_known_blocks(router, [worker, token, 0, 0]))[worker]
        yield router, sources


def salt_of(source: FakeSource, namespace: Namespace) -> str:
    """Return the salt that the events of a namespace have in place of the client's."""
    return source.feed._identities.of(namespace).cache_salt


@pytest.mark.parametrize("form", ["array", "map"])
def test_each_prompt_is_routed_to_the_server_that_has_it_cached(form: str) -> None:
    async def test() -> None:
        async with router_and_sources(form) as (router, sources):
            for index, prompt in enumerate(PROMPTS):
                sources[index % NUM_WORKERS].store(*prompt)
            for worker in range(NUM_WORKERS):
                last_prompt = PROMPTS[len(PROMPTS) - NUM_WORKERS + worker]
                await wait_for(router, worker, last_prompt, PROMPT_BLOCKS)
            selected = [
                (await router.select({"model_name": MODEL, "token_ids": [*prompt, 1]}))["worker_id"]
                for prompt in PROMPTS
            ]
            assert selected == [index % NUM_WORKERS for index in range(len(PROMPTS))]

    asyncio.run(test())


@pytest.mark.parametrize("form", ["array", "map"])
def test_salted_prompts_are_never_published(form: str) -> None:
    async def test() -> None:
        async with router_and_sources(form) as (router, (source, *_)):
            for prompt in SALTED_PROMPTS:
                source.store(*prompt, namespace=SALTED)
            source.store(*PROMPTS[0], namespace=BASE)
            await wait_for(router, 0, PROMPTS[0], PROMPT_BLOCKS)
            for prompt in SALTED_PROMPTS:
                assert not any((await count_known_blocks(router, prompt)).values())
                assert not any((await count_known_blocks(router, prompt, SALTED.salt)).values())
            num_blocks_by_worker = await count_known_blocks(router, SALTED_PROMPTS[0], salt_of(source, SALTED))
            assert not any(num_blocks_by_worker.values())

    asyncio.run(test())


@pytest.mark.parametrize("form", ["array", "map"])
def test_evicted_blocks_are_forgotten(form: str) -> None:
    async def test() -> None:
        async with router_and_sources(form) as (router, (source, *_)):
            source.cache.purge()
            source.store(*PROMPTS[0])
            await wait_for(router, 0, PROMPTS[0], PROMPT_BLOCKS)
            source.evict(3)
            await wait_for(router, 0, PROMPTS[0], PROMPT_BLOCKS - 3)
            source.cache.purge()
            source.feed.publish()
            await wait_for(router, 0, PROMPTS[0], 0)

    asyncio.run(test())
