"""A layer in one call gives the same bits as its parts called one after the other."""

import ctypes
from collections.abc import Iterator

import pytest
import torch

from radixkv.kernels.native import gemm
from radixkv.kernels.native.attention import Attention, Queries
from radixkv.kernels.native.attention_work import plan_work
from radixkv.kernels.native.gemm import Panels
from radixkv.kernels.native.layer import KVView, LayerParts, NativeLayers, Weights
from radixkv.kernels.native.rows import NativeNorm, NativeRows
from radixkv.kernels.norm_style import GEMMA, LLAMA, NormStyle
from radixkv.kernels.scoring import Scoring

from ..cases import LAYER, Heads, Step, clone, make_step

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HIDDEN, INNER, HEAD_DIM = 96, 160, 32
HEADS = Heads(6, 2)
WIDTH = (HEADS.num_query_heads + 2 * HEADS.num_kv_heads) * HEAD_DIM


@pytest.fixture(autouse=True)
def in_use(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_library", None)
    gemm.use(library)
    torch.manual_seed(0)


@pytest.fixture(params=[1, 3], ids=["1 thread", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    usual_num_threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(usual_num_threads)


def norm(rows: NativeRows, size: int, dtype: torch.dtype, style: NormStyle) -> NativeNorm:
    weight = 1 + 0.3 * torch.randn(size)
    return rows.norm(weight.to(dtype) if style.rounds_first else weight, 1e-5, style)


def weights(out_features: int, in_features: int, dtype: torch.dtype, *, has_bias: bool = False) -> Weights:
    weight = (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype)
    return Weights(Panels(weight), torch.randn(out_features).to(dtype) if has_bias else None)


def make_parts(rows: NativeRows, dtype: torch.dtype, kind: str) -> LayerParts:
    """Make a layer.

    Args:
        rows: the row operations.
        dtype: dtype of the weights.
        kind: "plain" for a layer of Llama. "rich" for one with biases, norms of the heads in Gemma's style, and
            separate weights of gate and up.
    """
    is_rich = kind == "rich"
    style, has_bias = (GEMMA, True) if is_rich else (LLAMA, False)
    heads_norms = [norm(rows, HEAD_DIM, dtype, style) if is_rich else None for _ in range(2)]
    return LayerParts(
        norm(rows, HIDDEN, dtype, style),
        norm(rows, HIDDEN, dtype, style),
        weights(WIDTH, HIDDEN, dtype, has_bias=has_bias),
        *heads_norms,
        weights(HIDDEN, HEADS.num_query_heads * HEAD_DIM, dtype),
        weights(INNER if is_rich else 2 * INNER, HIDDEN, dtype, has_bias=has_bias),
        weights(INNER, HIDDEN, dtype, has_bias=has_bias) if is_rich else None,
        weights(HIDDEN, INNER, dtype, has_bias=has_bias),
        *(HEADS.num_query_heads, HEADS.num_kv_heads, HEAD_DIM),
    )


def scoring_of(kind: str) -> Scoring:
    return Scoring(0.2, 50, 4.0, torch.randn(6)) if kind == "rich" else Scoring(0.2)


class Steps:
    """Computes the tokens of a step with a layer, in one call or part by part."""

    def __init__(self, library: ctypes.CDLL, step: Step, parts: LayerParts, scoring: Scoring) -> None:
        self.library, self.step, self.parts, self.scoring = library, step, parts, scoring
        self.rows = NativeRows(library)
        num_tokens = len(step.query)
        self.largest = torch.rand(num_tokens, HEADS.num_kv_heads)
        angles = torch.randn(num_tokens, HEAD_DIM)
        self.cos, self.sin = (each.to(parts.dtype) for each in (angles.cos(), angles.sin()))
        self.work = plan_work(
            step.batch,
            group_size=HEADS.num_query_heads // HEADS.num_kv_heads,
            num_kv_heads=HEADS.num_kv_heads,
            head_dim=HEAD_DIM,
            window=scoring.window,
            num_threads=torch.get_num_threads(),
        )

    def attention(self, queries: Queries) -> Attention:
        return Attention(self.library, queries, self.step.pool, self.work, self.scoring, torch.get_num_threads())

    def in_one_call(self, hidden: torch.Tensor) -> torch.Tensor:
        layers = NativeLayers(self.library, [self.parts])
        attention = self.attention(layers.queries(len(hidden)))
        view = KVView(attention, [LAYER], self.scoring.sinks, self.step.batch.slots, self.largest)
        return layers(hidden, self.cos, self.sin, view)

    def one_by_one(self, hidden: torch.Tensor) -> torch.Tensor:
        parts, rows = self.parts, self.rows
        heads = multiply(parts.first(hidden), parts.heads).view(len(hidden), -1, HEAD_DIM)
        query, key, value = heads.split([HEADS.num_query_heads, HEADS.num_kv_heads, HEADS.num_kv_heads], 1)
        if parts.query and parts.key:
            query, key = parts.query(query), parts.key(key)
        query, key = (rows.rotate(each, self.cos, self.sin) for each in (query, key))
        rows.write_kv(key, value, self.step.batch.slots, self.step.pool, LAYER, self.largest)
        attended = self.attention(Queries.of(query))(query, LAYER, self.scoring.sinks)
        hidden = hidden + multiply(attended.flatten(1), parts.attended)
        normed = parts.second(hidden)
        if parts.up is None:
            gated = rows.gate(multiply(normed, parts.gate))
        else:
            gated = gemm.gate(normed, parts.gate.panels, parts.gate.bias, parts.up.panels, parts.up.bias)
        return hidden + multiply(gated, parts.down)


def multiply(rows: torch.Tensor, weights: Weights) -> torch.Tensor:
    return gemm.multiply(rows, weights.panels, weights.bias)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("kind", ["plain", "rich"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("query_lens", [[1, 1], [70, 3], [1, 400]], ids=str)
@pytest.mark.usefixtures("threads")
def test_a_layer_is_bitwise_identical_to_its_parts(
    query_lens: list[int], dtype: torch.dtype, kind: str, library: ctypes.CDLL
) -> None:
    parts, scoring = make_parts(NativeRows(library), dtype, kind), scoring_of(kind)
    step = make_step([100, 37], query_lens, HEADS, head_dim=HEAD_DIM, dtype=dtype)
    whole = Steps(library, step, parts, scoring)
    apart = Steps(library, Step(step.query, clone(step.pool), step.batch), parts, scoring)
    apart.cos, apart.sin, apart.largest = whole.cos, whole.sin, whole.largest.clone()
    hidden = torch.randn(sum(query_lens), HIDDEN).to(dtype)
    hidden_before = hidden.clone()
    for _ in range(2):  # in the second call, threads reuse the memory that they keep
        assert torch.equal(whole.in_one_call(hidden), apart.one_by_one(hidden))
        assert torch.equal(whole.step.pool.blocks, apart.step.pool.blocks)
        assert torch.equal(whole.largest, apart.largest)
    assert torch.equal(hidden, hidden_before), "the input is not changed"
    assert whole.in_one_call(hidden[None])[0].shape == hidden.shape


def test_cosines_and_sines_of_other_layouts_are_rejected(library: ctypes.CDLL) -> None:
    parts = make_parts(NativeRows(library), torch.bfloat16, "plain")
    steps = Steps(library, make_step([20], [3], HEADS, head_dim=HEAD_DIM, dtype=torch.bfloat16), parts, Scoring(0.2))
    hidden = torch.randn(3, HIDDEN).bfloat16()
    with pytest.raises(ValueError, match=r"^rows: expected .* in torch.bfloat16, got .* in torch.float32$"):
        steps.in_one_call(hidden.float())
    cos, steps.cos = steps.cos, steps.cos.float()
    with pytest.raises(ValueError, match=r"^cos: expected .* in torch.bfloat16, got .* in torch.float32$"):
        steps.in_one_call(hidden)
    steps.cos, steps.sin = cos, steps.sin.mT.contiguous().mT
    with pytest.raises(ValueError, match=r"^sin: .* got a strided one"):
        steps.in_one_call(hidden)


def test_a_larger_step_follows_a_smaller_one(library: ctypes.CDLL) -> None:
    parts = make_parts(NativeRows(library), torch.float32, "plain")
    for num_tokens in (1, 300, 2, 600):
        step = make_step([20], [num_tokens], HEADS, head_dim=HEAD_DIM)
        steps, hidden = Steps(library, step, parts, Scoring(0.2)), torch.randn(num_tokens, HIDDEN)
        assert torch.equal(steps.in_one_call(hidden), steps.one_by_one(hidden))
