"""Generations that keep some of their K/V entries: the weights, the choice and the copies of entries."""

import pytest
import torch

from radixkv.compute.kept_entries import attention_mass, copy_entries, first_and_last, heaviest_and_last, move_entries
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4
from radixkv.kernels.reference import write_kv
from radixkv.kernels.scoring import Scoring

BLOCK_SIZE, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = 4, 2, 3, 8


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("num_queries", [1, 5, 37])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": torch.tensor([0.5, -1, 2, 0, 3, 1])}])
def test_scores_are_sums_of_attention_weights(num_queries: int, options: dict[str, object]) -> None:
    scoring = Scoring(0.7, **options)
    pool = KVPool.allocate(16, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.float32)
    key = random_tensor(41, NUM_KV_HEADS, HEAD_DIM)
    query = random_tensor(num_queries, NUM_KV_HEADS * GROUP_SIZE, HEAD_DIM)
    block_ids = torch.tensor([7, 3, 9, 0, 1, 2, 15, 4, 5, 6, 8])
    slots = block_ids[torch.arange(41) // BLOCK_SIZE] * BLOCK_SIZE + torch.arange(41) % BLOCK_SIZE
    write_kv(key, key, slots, pool, 1)
    expected = torch.zeros(NUM_KV_HEADS, 41)
    for row in range(num_queries):
        for head in range(NUM_KV_HEADS * GROUP_SIZE):
            seen = key[: 41 - num_queries + row + 1, head // GROUP_SIZE]
            scores = seen @ query[row, head] * 0.7
            if scoring.softcap is not None:
                scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
            sink = [] if scoring.sinks is None else [scoring.sinks[head : head + 1]]
            weights = torch.cat([scores, *sink]).softmax(0)[: len(seen)]
            expected[head // GROUP_SIZE, : len(seen)] += weights
    mass = attention_mass(query, pool, 1, block_ids, 41, scoring)
    torch.testing.assert_close(mass, expected)


def test_a_window_is_refused() -> None:
    pool = KVPool.allocate(1, 1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.float32)
    with pytest.raises(AssertionError, match="window"):
        attention_mass(random_tensor(1, NUM_KV_HEADS, HEAD_DIM), pool, 0, torch.tensor([0]), 1, Scoring(1.0, window=2))


def masses(*values: float) -> torch.Tensor:
    """Return the attention mass of the entries of one head in one layer, `[1, 1, num_entries]`."""
    return torch.tensor([[values]])


def test_the_first_and_the_last_are_chosen() -> None:
    assert first_and_last(10, num_sinks=2, num_entries=5).tolist() == [0, 1, 7, 8, 9]
    assert first_and_last(10, num_sinks=0, num_entries=3).tolist() == [7, 8, 9]


def test_the_heaviest_before_the_window_are_chosen_and_the_window_whatever_it_weighs() -> None:
    chosen = heaviest_and_last(masses(0, 5, 1, 4, 2, 0, 0), window=2, num_entries=5, is_pooled=False)
    assert chosen.tolist() == [[[1, 3, 4, 5, 6]]]


def test_ties_are_broken_in_favor_of_the_first() -> None:
    chosen = heaviest_and_last(masses(*[1.0] * 1000), window=1, num_entries=4, is_pooled=False)
    assert chosen.tolist() == [[[0, 1, 2, 999]]]


def test_each_head_chooses_for_itself() -> None:
    masses_of_two_heads = torch.tensor([[[3.0, 0, 0, 0], [0, 0, 3.0, 0]]])
    chosen = heaviest_and_last(masses_of_two_heads, window=1, num_entries=2, is_pooled=False)
    assert chosen.tolist() == [[[0, 3], [2, 3]]]


def test_pooling_selects_neighbours_of_heavy_entries() -> None:
    single_peak = masses(1, 1, 1, 1, 1, 1, 90, 1, 1, 1, 1, 0)
    assert heaviest_and_last(single_peak, window=1, num_entries=6, is_pooled=True).tolist() == [[[4, 5, 6, 7, 8, 11]]]


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, INT4]
NUM_LAYERS = 3


def filled_pool(dtype: torch.dtype, *, is_by_layer: bool) -> KVPool:
    pool = KVPool.allocate(6, NUM_LAYERS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype, is_by_layer=is_by_layer)
    pool.blocks.copy_(torch.randint(0, 64, pool.blocks.shape, generator=torch.Generator().manual_seed(0)))
    return pool


def stored_bytes(pool: KVPool, block_ids: torch.Tensor, layer: int, head: int, index: int) -> bytes:
    """Return K, V and their scales of one entry of a block table, as they are stored."""
    position = (int(block_ids[index // BLOCK_SIZE]), layer, slice(None), head, index % BLOCK_SIZE)
    tensors = [pool.values[position]]
    if pool.scales is not None:
        tensors.append(pool.scales[position])
    return b"".join(each.contiguous().view(torch.uint8).numpy().tobytes() for each in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_by_layer", [False, True])
def test_chosen_entries_are_copied_as_they_are_stored(dtype: torch.dtype, is_by_layer: bool) -> None:
    pool = filled_pool(dtype, is_by_layer=is_by_layer)
    sources, targets = torch.tensor([4, 0, 2]), torch.tensor([5, 1])
    chosen_by_head = [torch.randperm(12)[:7].sort().values for _ in range(NUM_LAYERS * NUM_KV_HEADS)]
    chosen = torch.stack(chosen_by_head).view(NUM_LAYERS, NUM_KV_HEADS, 7)
    before = pool.blocks.clone()
    copy_entries(pool, chosen, sources, targets)
    for layer in range(NUM_LAYERS):
        for head in range(NUM_KV_HEADS):
            for index in range(7):
                expected = stored_bytes(pool, sources, layer, head, int(chosen[layer, head, index]))
                assert stored_bytes(pool, targets, layer, head, index) == expected
    unwritten = [0, 2, 3, 4]
    assert torch.equal(pool.blocks[unwritten], before[unwritten])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_takes_the_place_of_another_one_in_each_head(dtype: torch.dtype) -> None:
    pool = filled_pool(dtype, is_by_layer=True)
    block_ids = torch.tensor([3, 1])
    targets = torch.tensor([[0, 6], [3, 1], [6, 5]])  # where entry 6 is moved, by layer and head
    before = {
        (layer, head, index): stored_bytes(pool, block_ids, layer, head, index)
        for layer in range(NUM_LAYERS)
        for head in range(NUM_KV_HEADS)
        for index in range(8)
    }
    move_entries(pool, block_ids, 6, targets)
    for (layer, head, index), stored in before.items():
        expected = before[layer, head, 6] if index == targets[layer, head] else stored
        assert stored_bytes(pool, block_ids, layer, head, index) == expected
