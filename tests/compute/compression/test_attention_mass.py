import pytest
import torch

from radixkv.compute.compression.attention_mass import attention_mass
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.reference import write_kv
from radixkv.kernels.scoring import Scoring

SIZE, HEADS, GROUP, DIM = 4, 2, 3, 8


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_queries", [1, 5, 37])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1, 2, 0, 3, 1])}])
def test_it_is_the_sum_of_the_weights_of_plain_attention(num_queries: int, options: dict[str, object]) -> None:
    scoring = Scoring(0.7, **options)
    pool = KVPool.allocate(16, 2, HEADS, SIZE, DIM, dtype=torch.float32)
    key, query = random(41, HEADS, DIM), random(num_queries, HEADS * GROUP, DIM)
    block_ids = torch.tensor([7, 3, 9, 0, 1, 2, 15, 4, 5, 6, 8])
    slots = block_ids[torch.arange(41) // SIZE] * SIZE + torch.arange(41) % SIZE
    write_kv(key, key, slots, pool, 1)
    expected = torch.zeros(HEADS, 41)
    for row in range(num_queries):
        for head in range(HEADS * GROUP):
            seen = key[: 41 - num_queries + row + 1, head // GROUP]
            scores = seen @ query[row, head] * 0.7
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            sink = [] if scoring.sinks is None else [scoring.sinks[head : head + 1]]
            weights = torch.cat([scores, *sink]).softmax(0)[: len(seen)]
            expected[head // GROUP, : len(seen)] += weights
    mass = attention_mass(query, pool, 1, block_ids, 41, scoring)
    torch.testing.assert_close(mass, expected)


def test_a_window_is_refused() -> None:
    pool = KVPool.allocate(1, 1, HEADS, SIZE, DIM, dtype=torch.float32)
    with pytest.raises(AssertionError, match="window"):
        attention_mass(random(1, HEADS, DIM), pool, 0, torch.tensor([0]), 1, Scoring(1.0, window=2))
