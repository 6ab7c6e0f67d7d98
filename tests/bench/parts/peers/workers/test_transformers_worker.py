"""Both modes of transformers give the same tokens, with a shared prefix and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.parts.peers import checkpoint
from bench.parts.peers.workers.loop import WorkerOptions
from bench.parts.peers.workers.task import Task
from bench.parts.peers.workers.transformers_worker import _cache_keyword, start


def prompts() -> list[list[int]]:
    """Return three prompts of 40 tokens, of which the first 24 are shared."""
    token_ids = np.random.default_rng(3).integers(0, 250, (3, 40))
    token_ids[:, :24] = token_ids[0, :24]
    return token_ids.tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    checkpoint.main("tiny", "float32", str(directory))
    return directory


def test_the_cache_argument_depends_on_the_version_of_transformers() -> None:
    class Older:
        def forward(self, past_key_values: object = None) -> None: ...

    class Newer:
        def forward(self, cache: object = None) -> None: ...

    assert (_cache_keyword(Older()), _cache_keyword(Newer())) == ("past_key_values", "cache")


def test_a_copied_cache_changes_no_token(model: Path) -> None:
    engine = start(WorkerOptions(model, "float32", 1, "generate", Path()))
    cold = engine.run(Task(prompts(), 4))
    engine.run(Task(prompts()[:1], 1, shared_tokens=24, fills_cache=True))
    for at_once in (1, 2, 3):
        warm = engine.run(Task(prompts(), 4, at_once, shared_tokens=24))
        assert warm.token_ids == cold.token_ids
        assert warm.cached_tokens == [24] * 3
        assert all(0 < each <= warm.wall_s for each in warm.first_s)
    with pytest.raises(ValueError, match="the cache was filled with another prefix"):
        engine.run(Task([[9] * 40], 1, shared_tokens=24))
    engine.close()


def test_continuous_batching_gives_the_same_tokens(model: Path) -> None:
    expected = start(WorkerOptions(model, "float32", 1, "generate", Path())).run(Task(prompts(), 4)).token_ids
    engine = start(WorkerOptions(model, "float32", 1, "batching", Path()))
    try:
        for at_once in (1, 2):
            done = engine.run(Task(prompts(), 4, at_once))
            assert done.token_ids == expected
            assert all(0 < each <= done.wall_s for each in done.first_s)
    finally:
        engine.close()
