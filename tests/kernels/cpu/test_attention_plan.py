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
        group_size, 64, torch.float32, window, is_whole=window is not None, reads_in_place=reads_in_place
    )


def batch_of(lengths: list[tuple[int, int]], tables: list[np.ndarray] | None = None) -> PagedBatch:
    """Requests of (prefix, query) tokens; without tables each in blocks of its own, one after the other."""
    kv_lens = [prefix + query for prefix, query in lengths]
    num_blocks = [-(-kv_len // BLOCK) for kv_len in kv_lens]
    ends = np.cumsum(num_blocks)
    own = [np.arange(end - count, end, dtype=np.int32) for end, count in zip(ends, num_blocks, strict=True)]
    return PagedBatch.build([query for _, query in lengths], kv_lens, tables or own, BLOCK)


def seen_keys(batch: PagedBatch, groups: list[Group], group_size: int, window: int | None) -> dict[int, list[int]]:
    """The slots that each row of the step sees, in the order in which its pieces are merged."""
    keys: dict[int, list[int]] = {}
    for group in groups:
        tokens = (
            np.arange(group.first_token, group.first_token + group.num_tokens)
            if group.tokens is None
            else group.tokens.numpy()
        )
        rows = (tokens[:, None] * group_size + np.arange(group_size)).reshape(-1)
        own: list[list[int]] = [[] for _ in rows]
        pieces = [0] * len(rows)
        for strip in group.strips:
            blocks_a_strip = strip.num_units * strip.unit_tokens // BLOCK
            if strip.block_ids is None:
                assert strip.first_block is not None
                blocks = np.arange(strip.first_block, strip.first_block + blocks_a_strip)
            else:
                blocks = strip.block_ids.numpy()
            slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1).tolist()
            assert len(slots) == strip.num_units * strip.unit_tokens
            for row in range(strip.first_row, strip.end_row):
                assert pieces[row] == strip.first_piece, "pieces follow each other"
                pieces[row] += strip.num_units
                own[row] += slots
        assert max(pieces) == group.num_pieces
        by_tail: list[list[int]] = []
        for tails in group.tails:
            blocks = tails.block_ids.numpy().reshape(tails.num_tiles, -1)
            slots = (blocks[:, :, None] * BLOCK + np.arange(BLOCK)).reshape(tails.num_tiles, -1)
            slots = slots[:, tails.num_skipped_keys : tails.num_skipped_keys + tails.num_keys]
            mask = tails.mask(window, torch.float32)
            for tile in range(tails.num_tiles):
                for row in range(tails.num_rows):
                    by_tail.append(slots[tile][(mask[tile, 0, row] == 0).numpy()].tolist())
        places = range(len(rows)) if group.tail_rows is None else group.tail_rows.tolist()
        for row, place in enumerate(places):
            assert int(rows[row]) not in keys, "each row is in one group"
            keys[int(rows[row])] = own[row] + by_tail[place]
    return keys


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
    keys = seen_keys(batch, groups, 3, window)
    assert sorted(keys) == [*range(3 * batch.num_tokens)]
    token = 0
    for (prefix, query), table in zip(lengths, tables, strict=True):
        for position in range(prefix, prefix + query):
            first = 0 if window is None else max(0, position + 1 - window)
            expected = [int(table[at // BLOCK]) * BLOCK + at % BLOCK for at in range(first, position + 1)]
            for row in range(3 * token, 3 * token + 3):
                assert keys[row] == expected
            token += 1


def cuts(batch: PagedBatch) -> dict[tuple[int, int], int]:
    """The number of pieces of the strips of each row, and the keys of its tail."""
    found = {}
    for group in plan_cpu_attention(batch, spec(group_size=1)):
        tokens = [*range(group.first_token, group.first_token + group.num_tokens)]
        if group.tokens is not None:
            tokens = group.tokens.tolist()
        for row, token in enumerate(tokens):
            strips = [strip for strip in group.strips if strip.first_row <= row < strip.end_row]
            for strip in strips:
                for unit in range(strip.num_units):
                    found[token, strip.first_piece + unit] = strip.unit_tokens
    return found


def test_pieces_depend_on_the_position_alone() -> None:
    whole = cuts(batch_of([(0, 1500)]))
    for prefix, query in [(1499, 1), (1200, 300), (511, 2), (640, 200)]:
        for (token, piece), unit_tokens in cuts(batch_of([(prefix, query)])).items():
            assert whole[prefix + token, piece] == unit_tokens
    assert whole[1499, 0] == 512
    assert (1499, 2) in whole
    assert whole[900, 1] == 256


def test_rows_that_share_blocks_are_in_one_strip() -> None:
    table = np.arange(200, dtype=np.int32)
    tables = [np.concatenate((table[:100], np.arange(200 + 10 * i, 210 + 10 * i, dtype=np.int32))) for i in range(4)]
    batch = batch_of([(1600, 1)] * 4, tables)
    (group,) = plan_cpu_attention(batch, spec())
    (strip,) = group.strips
    assert (strip.num_units, strip.unit_tokens, strip.first_row, strip.end_row) == (3, 512, 0, 12)
    assert strip.first_block == 0


def test_blocks_are_copied_only_where_they_are_not_adjacent() -> None:
    table = np.arange(130, dtype=np.int32)
    table[40:] += 1  # the second unit is broken, the third and the fourth are adjacent
    (group,) = plan_cpu_attention(batch_of([(2060, 1)], [table]), spec())
    assert [(strip.first_piece, strip.num_units, strip.first_block) for strip in group.strips] == [
        (0, 1, 0),
        (1, 1, None),
        (2, 2, 65),
    ]


def test_masks_of_long_windows_are_not_kept_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, of_window = batch_of([(1590, 20)]), spec(window=700)
    (kept,) = plan_cpu_attention(batch, of_window)[0].tails
    monkeypatch.setattr(attention_plan, "_MAX_KEPT_MASK_ELEMENTS", 100)
    (made,) = plan_cpu_attention(batch, of_window)[0].tails
    assert kept.kept_mask is not None
    assert made.kept_mask is None
    assert torch.equal(made.mask(700, torch.float32), kept.kept_mask)


def test_no_mask_is_larger_than_a_group_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_MAX_GROUP_ELEMENTS", 50_000)
    batch = batch_of([(1500, 100)])
    groups = plan_cpu_attention(batch, spec(window=1_000_000))
    sizes = [tails.num_tiles * tails.num_rows * tails.num_keys for group in groups for tails in group.tails]
    assert sum(group.num_tokens for group in groups) == 100
    assert max(sizes) <= 50_000 + 16 * 1664, "but for rows that fill up sixteen"
