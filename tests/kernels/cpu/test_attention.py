import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch

from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cancelling_inputs import CANCELLING_SCALE, sensitive_attention
from radixkv.kernels.cpu import attention, attention_plan
from radixkv.kernels.cpu.attention_plan import plan_cpu_attention
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring

from ..cases import GQA, LAYER, MHA, MQA, RAGGED, Heads, Step, attention_by_num_rows, clone, cut, make_step

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
SEVEN = Heads(7, 1)


def attend(query: torch.Tensor, pool: KVPool, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
    groups = plan_cpu_attention(batch, attention.spec_of(query, pool, scoring))
    return attention.paged_attention(query, pool, LAYER, groups, scoring)


def error_against_reference(
    step: Step, *, window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> float:
    scoring = Scoring(0.9 * step.query.shape[-1] ** -0.5, window, softcap, sinks)  # not the scale that torch would take
    expected = reference.paged_attention(step.query, step.pool, LAYER, step.batch, scoring)
    got = attend(step.query, step.pool, step.batch, scoring)
    assert got.dtype == step.query.dtype
    assert got.shape == step.query.shape
    assert torch.isfinite(expected).all()
    return (got.float() - expected.float()).abs().max().item()


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("heads", [MHA, GQA, MQA], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED.keys())
def test_matches_reference_on_ragged_batches(lengths: tuple[list[int], list[int]], heads: Heads) -> None:
    assert error_against_reference(make_step(*lengths, heads)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("is_adjacent", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [GQA, SEVEN], ids=["GQA", "group of 7"])
def test_matches_reference_over_units_parts_and_tiles(heads: Heads, dtype: torch.dtype, is_adjacent: bool) -> None:
    step = make_step([1000, 511, 0, 700, 1300], [300, 2, 70, 1, 17], heads, dtype=dtype, is_adjacent=is_adjacent)
    assert error_against_reference(step) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int4], ids=str)
def test_reads_quantized_pools(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    step = make_step([37, 600], [20, 70], GQA, dtype=dtype, kv_dtype=kv_dtype)
    assert error_against_reference(step) < 1.5 * TOLERANCE[dtype]


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_adjacent", [True, False], ids=["in place", "copied"])
def test_latents_are_keys_and_values(is_adjacent: bool, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    sizes = {"dtype": dtype, "kv_dtype": kv_dtype, "head_dim": 576, "is_adjacent": is_adjacent}
    step = make_step([1000, 0, 600], [70, 37, 1], SEVEN, **sizes, is_latent=True)
    assert error_against_reference(step) < 1.5 * TOLERANCE[dtype]
    query, batch = cut(step, 0, 69, 70)
    alone = attend(query, step.pool, batch, Scoring(0.03))
    together = attend(step.query, step.pool, step.batch, Scoring(0.03))
    assert torch.equal(alone[0], together[69])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [GQA, SEVEN], ids=["GQA", "group of 7"])
def test_a_sink_is_added_to_the_softmax_denominator_once(heads: Heads, dtype: torch.dtype, window: int | None) -> None:
    step = make_step([1000, 511, 0, 700], [300, 2, 70, 1], heads, dtype=dtype)
    sinks = torch.linspace(-3, 8, heads.num_query_heads, dtype=dtype)
    assert error_against_reference(step, window=window, sinks=sinks) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("sink", "share"), [(float("-inf"), 1.0), (80.0, 0.0)], ids=["no share", "all of it"])
def test_extreme_sinks_have_no_weight_or_all_of_it(sink: float, share: float, window: int | None) -> None:
    step = make_step([600], [37], GQA)
    plain = attend(step.query, step.pool, step.batch, Scoring(0.2, window))
    got = attend(step.query, step.pool, step.batch, Scoring(0.2, window, sinks=torch.full((6,), sink)))
    torch.testing.assert_close(got, share * plain)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("window", [1, 7, 16, 17, 40, 1000])
@pytest.mark.parametrize("query_lens", [[1, 37], [80, 64]])
def test_window_counts_the_query_token(query_lens: list[int], window: int) -> None:
    step = make_step([61, 0], query_lens, GQA)
    assert error_against_reference(step, window=window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("window", [None, 9])
def test_softcap_bounds_the_scores(window: int | None) -> None:
    step = make_step([37, 0], [20, 17], GQA)
    step.query.mul_(4)  # scores large enough for the cap to bite
    assert error_against_reference(step, softcap=2.0, window=window) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("scoring", [{}, {"window": 50}, {"softcap": 5.0}, {"window": 50, "softcap": 5.0}], ids=str)
def test_bounded_groups_and_copies_give_the_same_result(
    scoring: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_plan, "_MAX_GROUP_ROWS", 100)
    monkeypatch.setattr(attention_plan, "_MAX_GROUP_ELEMENTS", 5000)
    monkeypatch.setattr(attention_plan, "_MAX_COPIED_TOKENS", 100)
    monkeypatch.setattr(attention, "_MAX_SOFTCAP_SCORES", 5000)
    step = make_step([13, 1100], [101, 25], GQA)
    assert error_against_reference(step, **scoring) < TOLERANCE[torch.float32]


def test_a_window_reads_only_the_blocks_inside_it() -> None:
    step = make_step([400], [4], MHA)
    out_of_reach = step.batch.block_tables[0, :22].long()  # 0..351; the tile at 384 sees from 352 on
    step.pool.blocks[out_of_reach] = 0xFF
    assert torch.isfinite(attend(step.query, step.pool, step.batch, Scoring(1.0, window=9))).all()


def in_parts(step: Step, cuts: list[int], scoring: Scoring) -> torch.Tensor:
    """The rows of a batch's only request, some at a time."""
    parts = []
    for start, end in itertools.pairwise([0, *cuts, step.batch.num_tokens]):
        query, batch = cut(step, 0, start, end)
        parts.append(attend(query, step.pool, batch, scoring))
    return torch.cat(parts)


CUTS = ([1], [17, 255, 256, 257, 599], [63, 64, 512, 513], [583], [590], [127, 128, 129, 700])


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [MHA, GQA, MQA, SEVEN], ids=["MHA", "GQA", "MQA", "group of 7"])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"window": 300}, {"softcap": 3.0}, {"sinks": 1.0}, {"sinks": 1.0, "window": 40}],
    ids=str,
)
def test_chunking_a_sequence_does_not_change_a_bit(options: dict[str, float], heads: Heads, dtype: torch.dtype) -> None:
    step = make_step([0], [800], heads, dtype=dtype)
    options = options | {"sinks": torch.linspace(-3, 6, heads.num_query_heads)} if "sinks" in options else options
    whole = in_parts(step, [], Scoring(0.2, **options))
    for cuts in CUTS:
        assert torch.equal(in_parts(step, cuts, Scoring(0.2, **options)), whole)


def with_cancelling(what: Literal["values", "scores"], heads: Heads, dtype: torch.dtype, head_dim: int = 64) -> Step:
    """800 tokens whose sums cancel. Other sums rarely show their order, once in a million after rounding to half
    precision.
    """
    step = make_step([0], [800], heads, head_dim=head_dim, dtype=dtype)
    query, key, value = sensitive_attention(what, 800, heads.num_query_heads, heads.num_kv_heads, head_dim)
    reference.write_kv(key.to(dtype), value.to(dtype), step.batch.slots, step.pool, LAYER)
    return Step(query.to(dtype), step.pool, step.batch)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [Heads(4, 4), GQA, SEVEN], ids=["MHA", "GQA", "group of 7"])
@pytest.mark.parametrize("what", ["values", "scores"])
def test_the_summation_order_does_not_depend_on_chunking(
    what: Literal["values", "scores"], heads: Heads, dtype: torch.dtype, head_dim: int, window: int | None
) -> None:
    step = with_cancelling(what, heads, dtype, head_dim)
    whole = in_parts(step, [], Scoring(CANCELLING_SCALE, window))
    for cuts in CUTS:
        assert torch.equal(in_parts(step, cuts, Scoring(CANCELLING_SCALE, window)), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["values", "scores"])
def test_the_summation_order_is_detected(
    what: Literal["values", "scores"], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums_over: Literal["keys", "head_dim"] = "keys" if what == "values" else "head_dim"
    monkeypatch.setattr(attention, "_fused_attention", attention_by_num_rows(sums_over))
    step = with_cancelling(what, GQA, dtype)
    parts, whole = (in_parts(step, cuts, Scoring(CANCELLING_SCALE)) for cuts in ([799], []))
    assert not torch.equal(parts, whole)


def watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.Size]]:
    """Collect the shapes of queries and keys that the fused attention gets."""
    calls: list[tuple[torch.Size, torch.Size]] = []
    fused_attention = attention._fused_attention

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        calls.append((query.shape, key.shape))
        return fused_attention(query, key, value, **options)

    monkeypatch.setattr(attention, "_fused_attention", watched)
    return calls


@pytest.mark.parametrize("num_tokens", [1, 17, 90])
@pytest.mark.parametrize("prefix_len", [0, 500, 1100])
@pytest.mark.parametrize("heads", [GQA, SEVEN, Heads(1, 1)], ids=["GQA", "group of 7", "a single head"])
def test_summation_lengths_are_the_same_on_all_processors(
    heads: Heads, prefix_len: int, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that computes all lengths in the same order would not show it in its bits."""
    calls = watch(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for window in (None, 300):
        step = make_step([prefix_len], [num_tokens], heads, head_dim=40, dtype=torch.bfloat16)
        assert error_against_reference(step, window=window) < TOLERANCE[torch.bfloat16]
    for (num_units, num_matrices, num_rows, head_dim), (_, _, num_keys, _) in calls:
        assert (num_rows % 16, num_keys % 32, head_dim % 32) == (0, 0, 0)
        assert (
            num_units * num_matrices > 1 or num_rows > 32
        )  # the library would divide a single small matmul among threads
    assert calls


def share(step: Step, tables: Sequence[Sequence[int]]) -> Step:
    """Let requests of a step begin with the blocks of others."""
    batch = step.batch
    query_lens = batch.query_lens.tolist()
    own = [np.concatenate((table, row[len(table) :])) for table, row in zip(tables, batch.host_tables, strict=True)]
    shared = PagedBatch.build(query_lens, batch.kv_lens, [t.astype(np.int32) for t in own], batch.block_size)
    return Step(step.query, step.pool, shared)


def family(dtype: torch.dtype, heads: Heads, is_adjacent: bool) -> Step:
    """A system prompt of 1,100 tokens, a document after it that three share, and a request with nothing in common."""
    step = make_step(
        [2300, 2150, 1300, 2305, 1110, 1200], [1, 60, 1, 5, 130, 1], heads, dtype=dtype, is_adjacent=is_adjacent
    )
    system, document = step.batch.host_tables[0][:68], step.batch.host_tables[0][:130]
    return share(step, [document, document, system, document, system, ()])


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("is_adjacent", [True, False], ids=["in place", "copied"])
@pytest.mark.parametrize("heads", [GQA, SEVEN], ids=["GQA", "group of 7"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
def test_rows_are_bitwise_identical_with_and_without_prefix_sharing(
    has_sinks: bool, dtype: torch.dtype, heads: Heads, is_adjacent: bool
) -> None:
    step = family(dtype, heads, is_adjacent)
    sinks = torch.linspace(-3, 6, heads.num_query_heads) if has_sinks else None
    assert error_against_reference(step, sinks=sinks) < TOLERANCE[dtype]
    scoring = Scoring(0.2, sinks=sinks)
    together = attend(step.query, step.pool, step.batch, scoring)
    for request, (first, last) in enumerate(itertools.pairwise(step.batch.query_starts)):
        query, batch = cut(step, request, 0, last - first)
        assert torch.equal(attend(query, step.pool, batch, scoring), together[first:last])
        query, batch = cut(step, request, last - first - 1, last - first)
        assert torch.equal(attend(query, step.pool, batch, scoring)[0], together[last - 1])


def test_a_shared_prefix_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch(monkeypatch)
    step = make_step([1600] * 5, [1] * 5, GQA)
    attend(step.query, step.pool, step.batch, Scoring(0.2))
    num_alone = sum(key[0] * key[2] for _, key in calls)
    calls.clear()
    shared = share(step, [step.batch.host_tables[0][:100]] * 5)
    attend(shared.query, shared.pool, shared.batch, Scoring(0.2))
    num_shared = sum(key[0] * key[2] for _, key in calls)
    assert num_alone == 5 * 1664  # three units, and the tile [1536, 1664) each
    assert num_shared == 3 * 512 + 5 * 128


def test_each_level_of_sharing_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch(monkeypatch)
    step = make_step([1100] * 4, [1] * 4, GQA)
    system, document = step.batch.host_tables[0][:32], step.batch.host_tables[1][32:64]
    both = np.concatenate((system, document))
    shared = share(step, [system, both, both, system])
    attend(shared.query, shared.pool, shared.batch, Scoring(0.2))
    # The system prompt once, the document once, the units of two requests that have no document, four tiles.
    assert sum(key[0] * key[2] for _, key in calls) == 512 + 512 + 2 * 512 + 4 * 128


@pytest.mark.parametrize("broken_at", [None, 5, 40, 64, 96])
def test_adjacent_blocks_are_read_in_place(broken_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units whose blocks are not adjacent are copied, the others are not."""
    step = make_step([1800], [1], GQA, is_adjacent=True)
    table = step.batch.host_tables[0].copy()
    if broken_at is not None:
        table = np.where(table >= broken_at, table + 1, table)
        step.pool.blocks[broken_at + 1 :] = step.pool.blocks[broken_at:-1].clone()
        step.pool.blocks[broken_at] = 0xFF
    step = Step(step.query, step.pool, PagedBatch.build([1], [1801], [table], 16))
    copied = []
    copy = attention._copy_blocks
    monkeypatch.setattr(attention, "_copy_blocks", lambda *inputs: copied.append(len(inputs[2])) or copy(*inputs))
    assert error_against_reference(step) < TOLERANCE[torch.float32]
    units_in_place = {None: 3, 5: 2, 40: 2, 64: 3, 96: 3}[broken_at]
    own_tile = 16  # blocks of the part [1536, 1792) in place, and of the tile [1792, 1920)
    assert sum(copied) == (3 - units_in_place) * 32 + own_tile // 2


def test_only_written_slots_are_read() -> None:
    step = make_step([700], [30], GQA, is_adjacent=True)
    poisoned = clone(step.pool)
    written = step.batch.host_tables[0]
    others = np.setdiff1d(np.arange(len(poisoned.blocks)), written)
    poisoned.blocks[torch.from_numpy(others)] = 0xFF
    expected = attend(step.query, step.pool, step.batch, Scoring(0.2))
    assert torch.equal(attend(step.query, poisoned, step.batch, Scoring(0.2)), expected)
    assert torch.isfinite(expected).all()
