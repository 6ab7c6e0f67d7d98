"""The keys of a row are split at the same positions, whatever else is in the batch."""

import numpy as np
import pytest
import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cpu import attention_plan
from radixkv.kernels.cpu.attention_plan import AttentionSpec, Group, plan_cpu_attention

BLOCK = 16


def spec(*, group_size: int = 3, window: int | None = None, reads_in_place: bool = True) -> AttentionSpec:
    return AttentionSpec(
        group_size=group_size,
        row_elements=64,
        dtype=torch.float32,
        window=window,
        splits_keys=window is None,
        reads_in_place=reads_in_place,
    )


def batch_of(lengths: list[tuple[int, int]], tables: list[np.ndarray] | None = None) -> PagedBatch:
    """Build a batch of requests with `(prefix, query)` tokens.

    Without `tables`, no blocks are shared: each request has the blocks that follow those of the request before it.
    """
    kv_lens = [prefix + query for prefix, query in lengths]
    num_blocks = [-(-kv_len // BLOCK) for kv_len in kv_lens]
    ends = np.cumsum(num_blocks)
    own_tables = [np.arange(end - count, end, dtype=np.int32) for end, count in zip(ends, num_blocks, strict=True)]
    return PagedBatch.build([query for _, query in lengths], kv_lens, tables or own_tables, BLOCK)


def indices_of(selection: slice | torch.Tensor) -> np.ndarray:
    if isinstance(selection, slice):
        return np.arange(selection.start, selection.stop)
    return selection.numpy()


def seen_keys(batch: PagedBatch, groups: list[Group], group_size: int, window: int | None) -> dict[int, list[int]]:
    """Return the slots of the keys that each row of the step sees, in the order in which its pieces are merged."""
    seen_slots: dict[int, list[int]] = {}
    for group in groups:
        tokens = indices_of(group.tokens)
        rows = (tokens[:, None] * group_size + np.arange(group_size)).reshape(-1)

        # The units and parts, to which rows attend without a mask.
        strip_slots: list[list[int]] = [[] for _ in rows]
        num_pieces = [0] * len(rows)
        for strip in group.strips:
            blocks = indices_of(strip.blocks)
            num_units = strip.pieces.stop - strip.pieces.start
            slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1).tolist()
            assert len(slots) == num_units * strip.unit_tokens
            for row in indices_of(strip.rows):
                assert num_pieces[row] == strip.pieces.start, "pieces follow each other"
                num_pieces[row] += num_units
                strip_slots[row] += slots
        assert max(num_pieces) == group.num_strip_pieces

        # The tails, of which the mask hides some keys.
        tail_slots: list[list[int]] = []
        for tails in group.tails:
            num_tiles, num_rows = tails.positions.shape
            blocks = tails.block_ids.numpy().reshape(num_tiles, -1)
            slots = (blocks[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(num_tiles, -1)
            slots = slots[:, tails.num_skipped_keys : tails.num_skipped_keys + tails.num_keys]
            mask = tails.mask(window, torch.float32)
            for tile in range(num_tiles):
                for row in range(num_rows):
                    is_visible = (mask[tile, 0, row] == 0).numpy()
                    tail_slots.append(slots[tile][is_visible].tolist())

        for row, tail_row in enumerate(indices_of(group.tail_rows)):
            assert int(rows[row]) not in seen_slots, "each row is in one group"
            seen_slots[int(rows[row])] = strip_slots[row] + tail_slots[tail_row]
    return seen_slots


@pytest.mark.parametrize("reads_in_place", [True, False])
@pytest.mark.parametrize("window", [None, 40, 700])
def test_each_row_attends_to_each_of_its_keys_once_in_order(window: int | None, reads_in_place: bool) -> None:
    rng = np.random.default_rng(0)
    system = np.arange(900, 1000, dtype=np.int32)
    tables = []
    lengths = [(1600, 20), (1290, 300), (1601, 1), (0, 700), (5, 1), (2047, 2), (1600, 1)]
    for i, (prefix, query) in enumerate(lengths):
        table = rng.permutation(900).astype(np.int32)[: -(-(prefix + query) // BLOCK)]
        if i in (0, 2, 6):
            table[:100] = system
        tables.append(table)
    batch = batch_of(lengths, tables)
    groups = plan_cpu_attention(batch, spec(window=window, reads_in_place=reads_in_place))
    seen_slots = seen_keys(batch, groups, 3, window)
    assert sorted(seen_slots) == [*range(3 * batch.num_tokens)]
    token = 0
    for (prefix, query), table in zip(lengths, tables, strict=True):
        for position in range(prefix, prefix + query):
            first_key = 0 if window is None else max(0, position + 1 - window)
            expected = [int(table[key // BLOCK]) * BLOCK + key % BLOCK for key in range(first_key, position + 1)]
            for row in range(3 * token, 3 * token + 3):
                assert seen_slots[row] == expected
            token += 1


def keys_per_piece(batch: PagedBatch) -> dict[tuple[int, int], int]:
    """Return the number of keys of each unit and part, by token and index of the piece; tails are left out."""
    num_keys = {}
    for group in plan_cpu_attention(batch, spec(group_size=1)):
        for row, token in enumerate(indices_of(group.tokens)):
            strips = [strip for strip in group.strips if strip.rows.start <= row < strip.rows.stop]
            for strip in strips:
                for piece in indices_of(strip.pieces):
                    num_keys[int(token), int(piece)] = strip.unit_tokens
    return num_keys


def test_pieces_depend_on_the_position_alone() -> None:
    whole = keys_per_piece(batch_of([(0, 1500)]))
    for prefix, query in [(1499, 1), (1200, 300), (511, 2), (640, 200)]:
        for (token, piece), num_keys in keys_per_piece(batch_of([(prefix, query)])).items():
            assert whole[prefix + token, piece] == num_keys
    # Before the tile of token 1499, which begins at 1408, are two units of 512 keys and a part of 256 keys.
    assert whole[1499, 0] == 512
    assert (1499, 2) in whole
    # Before the tile of token 900, which begins at 896, are a unit and a part.
    assert whole[900, 1] == 256


def test_rows_that_share_blocks_are_in_one_strip() -> None:
    table = np.arange(200, dtype=np.int32)
    tables = [np.concatenate((table[:100], np.arange(200 + 10 * i, 210 + 10 * i, dtype=np.int32))) for i in range(4)]
    batch = batch_of([(1600, 1)] * 4, tables)
    (group,) = plan_cpu_attention(batch, spec())
    (strip,) = group.strips
    assert (strip.pieces, strip.unit_tokens, strip.rows) == (slice(0, 3), 512, slice(0, 12))
    assert strip.blocks == slice(0, 96)


def test_blocks_are_copied_only_where_they_are_not_adjacent() -> None:
    table = np.arange(130, dtype=np.int32)
    table[40:] += 1  # the second unit is broken, the third and the fourth are adjacent
    (group,) = plan_cpu_attention(batch_of([(2060, 1)], [table]), spec())
    assert [strip.pieces for strip in group.strips] == [slice(0, 1), slice(1, 2), slice(2, 4)]
    in_place, copied, in_place_again = (strip.blocks for strip in group.strips)
    assert (in_place, in_place_again) == (slice(0, 32), slice(65, 129))
    assert isinstance(copied, torch.Tensor)
    assert copied.tolist() == table[32:64].tolist()


def test_masks_of_long_windows_are_not_kept_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, window_spec = batch_of([(1590, 20)]), spec(window=700)
    (tails_with_mask,) = plan_cpu_attention(batch, window_spec)[0].tails
    monkeypatch.setattr(attention_plan, "_MAX_KEPT_MASK_ELEMENTS", 100)
    (tails_without_mask,) = plan_cpu_attention(batch, window_spec)[0].tails
    assert tails_with_mask.kept_mask is not None
    assert tails_without_mask.kept_mask is None
    assert torch.equal(tails_without_mask.mask(700, torch.float32), tails_with_mask.kept_mask)


def test_no_mask_is_larger_than_a_group_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_MAX_GROUP_ELEMENTS", 50_000)
    batch = batch_of([(1500, 100)])
    groups = plan_cpu_attention(batch, spec(window=1_000_000))
    sizes = [tails.positions.numel() * tails.num_keys for group in groups for tails in group.tails]
    assert sum(group.num_tokens for group in groups) == 100
    padded_keys = 1664  # 1,600 keys, padded to whole tiles
    assert max(sizes) <= 50_000 + 16 * padded_keys, "larger only by the rows that pad a tile to a multiple of 16"
