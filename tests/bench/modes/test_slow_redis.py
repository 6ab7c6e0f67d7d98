from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.modes.slow_redis import SlowRedis
from radixkv.errors import StoreUnavailable
from radixkv.offload.tiers.block_store import PutOutcome
from radixkv.offload.tiers.redis import RedisStore
from tests.offload.tiers.blocks import OBJECT_BYTES, block, key_of
from tests.patience import PATIENCE_S, wait_until


@pytest.fixture
def fast_store() -> Iterator[RedisStore]:
    with SlowRedis(0.0) as server:
        store = RedisStore(server.url, OBJECT_BYTES, timeout_s=PATIENCE_S)
        yield store
        store.close()


def test_the_server_accepts_blocks_but_stores_none(fast_store: RedisStore) -> None:
    assert fast_store.put([block(1), block(2)]).outcomes == (PutOutcome.STORED,) * 2
    assert fast_store.get([key_of(1), key_of(2)]) == [None, None]
    assert fast_store.exists([key_of(1), key_of(2)]) == [False, False]
    assert fast_store.delete([key_of(1)]) == 0


def test_a_server_that_never_responds_receives_the_commands() -> None:
    with SlowRedis(None) as server:
        store = RedisStore(server.url, OBJECT_BYTES, timeout_s=0.2)
        with pytest.raises(StoreUnavailable, match="got TimeoutError"):
            store.exists([key_of(1)])
        wait_until(lambda: server.num_commands > 0)
        store.close()
