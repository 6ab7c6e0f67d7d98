"""Tiers over gRPC with the embedded model: a server that is killed and restarted, and two that share a Redis."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from radixkv.service.client import Client, logits_of
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving

_BLOCK_SIZE, _POOL_TOKENS = 64, 1024
_PROMPTS = [[(index * 7 + number) % 251 for index in range(5 * _BLOCK_SIZE + 3)] for number in range(8)]


def tier_options(folder: Path) -> tuple[str, ...]:
    """Return the options of a server with the tiers host and disk, and a pool that is smaller than all prompts."""
    settings = ("tiers.host_bytes=100000000", f"tiers.disk_path={folder}", f"cache.capacity_tokens={_POOL_TOKENS}")
    return tuple(argument for setting in settings for argument in ("--set", setting))


def num_saved_blocks(client: Client) -> dict[str, int]:
    """Return how many blocks were saved to each tier."""
    return {each.tier: each.saved_blocks for each in client.stats().tiers}


def test_evicted_blocks_on_disk_survive_kill_9(tmp_path: Path) -> None:
    with serving(*tier_options(tmp_path)) as (process, address), Client(address, timeout_s=PATIENCE_S) as client:
        cold = [logits_of(client.prefill(prompt, return_logits=True)) for prompt in _PROMPTS]
        wait_until(lambda: min(num_saved_blocks(client).values()) >= 5 * 5)  # of five prompts
        warm = client.prefill(_PROMPTS[0], return_logits=True)
        assert (warm.usage.host_tokens, warm.usage.device_tokens) == (5 * _BLOCK_SIZE, 0)
        np.testing.assert_array_equal(logits_of(warm), cold[0])
        os.kill(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
    with serving(*tier_options(tmp_path)) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        client.purge(tenant="unknown")  # returns when the index of the disk has been read
        for prompt, logits in zip(_PROMPTS[:3], cold[:3], strict=True):
            loaded = client.prefill(prompt, return_logits=True)
            assert loaded.usage.disk_tokens == 5 * _BLOCK_SIZE
            assert loaded.usage.cached_tokens == 5 * _BLOCK_SIZE
            np.testing.assert_array_equal(logits_of(loaded), logits)
        deleted = {each.store: each.blocks for each in client.purge(everything=True).stores}
        assert deleted["disk"] >= 15
        assert client.prefill(_PROMPTS[0]).usage.cached_tokens == 0


@pytest.mark.skipif(SERVER is None, reason=WHY_NOT)
def test_a_second_server_loads_blocks_that_the_first_one_stored_in_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        secret = tmp_path / "secret"
        secret.write_text("a secret of both servers")
        shared = ("--set", f"tiers.redis_url={redis.url}", "--set", f"tiers.secret_file={secret}")
        with serving(*shared) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
            cold = [logits_of(client.prefill(prompt, return_logits=True)) for prompt in _PROMPTS]
            wait_until(lambda: num_saved_blocks(client) == {"redis": 5 * len(_PROMPTS)})
        with serving(*shared) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
            warm = [client.prefill(prompt, return_logits=True) for prompt in _PROMPTS]
            assert 5 * _BLOCK_SIZE in [each.usage.remote_tokens for each in warm], (
                "at least one prompt is loaded; on a busy machine others may be computed"
            )
            for each, logits in zip(warm, cold, strict=True):
                np.testing.assert_array_equal(logits_of(each), logits)
            deleted = {each.store: each.blocks for each in client.purge(everything=True).stores}
            assert deleted == {"redis": 5 * len(_PROMPTS)}
