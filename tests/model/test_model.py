import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
)

from radixkv.blocks import BlockCopy
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.errors import UnsupportedModel
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.model.tiny_model import build_tiny_model
from radixkv.startup.model_check import LOGITS_TOLERANCE, check_model
from radixkv.storage.device_pool import KVStorage
from tests.model.exact.checkpoints import CONFIGS, SHAPE, VOCAB_SIZE, load_eager, write_checkpoint

BLOCK_SIZE = 16
NUM_BLOCKS = 64
MAX_DIFFERENCE = 1e-4


@dataclass
class Served:
    """A checkpoint as radixkv serves it, and transformers' model of the same checkpoint as an oracle."""

    model: Model
    runner: Runner
    oracle: PreTrainedModel

    def expected(self, tokens: np.ndarray) -> torch.Tensor:
        """Return the oracle's logits after each token, `[num_tokens, vocab_size]`."""
        with torch.inference_mode():
            return self.oracle(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits[0]


@pytest.fixture(scope="module", params=list(CONFIGS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = write_checkpoint(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))
    assert len(list(directory.glob("*.safetensors"))) > 1, "the checkpoint is sharded"
    model = load_model(ModelConfig(path=str(directory), device="cpu"))
    storage = KVStorage(NUM_BLOCKS, BLOCK_SIZE, model.kv_shape, model.device)
    storage.pool.blocks.fill_(0xFF)  # nothing may depend on what was never written
    return Served(model, Runner(model, storage, TorchKernels()), load_eager(directory))


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype("<u4")


def blocks(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(NUM_BLOCKS)[:count].astype(np.int32)


def chunk(tokens: np.ndarray, start: int, end: int, block_ids: np.ndarray, copy: BlockCopy | None = None) -> Chunk:
    return Chunk(tokens.tobytes(), start, end, block_ids, copy, wants_logits=True)


def assert_agree(got: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (got - expected).abs().max().item()
    assert difference <= MAX_DIFFERENCE
    assert expected.std() > 100 * MAX_DIFFERENCE, "the oracle's logits are too flat to tell right from wrong"


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 37, 100])
def test_a_cold_prompt_agrees_with_eager_attention(served: Served, length: int) -> None:
    tokens = prompt(length)
    got = served.runner.run([chunk(tokens, 0, length, blocks(7))])
    assert_agree(got.logits[0], served.expected(tokens)[-1])


@pytest.mark.parametrize("num_cached", [BLOCK_SIZE, 2 * BLOCK_SIZE, 5 * BLOCK_SIZE])
def test_a_warm_prompt_agrees_with_eager_attention(served: Served, num_cached: int) -> None:
    tokens, block_ids = prompt(100), blocks(7)
    served.runner.run([chunk(tokens, 0, num_cached, block_ids)])
    got = served.runner.run([chunk(tokens, num_cached, 100, block_ids)])
    assert_agree(got.logits[0], served.expected(tokens)[-1])


@pytest.mark.parametrize("num_shared", [1, 15, 40, 63])
def test_a_hit_inside_a_block_agrees_with_eager_attention(served: Served, num_shared: int) -> None:
    first = prompt(100)
    second = np.concatenate([first[:num_shared], prompt(50, seed=1)])
    block_ids = blocks(20)
    served.runner.run([chunk(first, 0, 100, block_ids[:7])])
    num_whole_blocks = num_shared // BLOCK_SIZE
    table = np.concatenate([block_ids[:num_whole_blocks], block_ids[7:]])
    copy = BlockCopy(int(block_ids[num_whole_blocks]), int(block_ids[7]))
    got = served.runner.run([chunk(second, num_shared, second.size, table, copy)])
    assert_agree(got.logits[0], served.expected(second)[-1])


def test_a_prompt_in_chunks_agrees_with_eager_attention(served: Served) -> None:
    tokens, block_ids = prompt(100), blocks(7)
    expected = served.expected(tokens)
    ends = [1, 7, 16, 33, 34, 64, 99, 100]
    for start, end in zip([0, *ends], ends, strict=False):
        got = served.runner.run([chunk(tokens, start, end, block_ids)])
        assert_agree(got.logits[0], expected[end - 1])


def test_requests_of_one_batch_do_not_see_each_other(served: Served) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 17, 37, 100)]
    tables = [blocks(32)[start : start + 7] for start in (0, 7, 14, 21)]
    served.runner.run([chunk(prompts[3], 0, 50, tables[3])])
    starts = (0, 0, 0, 50)
    got = served.runner.run(
        [chunk(p, start, p.size, table) for p, start, table in zip(prompts, starts, tables, strict=True)]
    )
    for row, tokens in zip(got.logits, prompts, strict=True):
        assert_agree(row, served.expected(tokens)[-1])


def test_a_chunk_with_non_finite_values_is_reported_alone(served: Served) -> None:
    block_ids = blocks(20)
    served.runner.storage.pool.blocks[block_ids[0]] = 0xFF
    good, bad = chunk(prompt(40), 0, 40, block_ids[1:4]), chunk(prompt(40), 16, 40, np.r_[block_ids[0], block_ids[4:6]])
    assert served.runner.run([good, bad]).is_finite == [True, False]


@pytest.mark.parametrize("num_wanted", [1, 10])
@pytest.mark.parametrize(
    ("value", "where", "is_finite"),
    [
        (torch.nan, slice(7, 8), False),
        (torch.inf, slice(7, 8), False),
        (-torch.inf, slice(7, 8), True),  # a model may rule out tokens
        (-torch.inf, slice(None), False),
    ],
    ids=["NaN", "infinity", "a token ruled out", "all tokens ruled out"],
)
def test_a_chunk_whose_logits_are_not_finite_is_reported_as_such(
    served: Served, value: float, where: slice, is_finite: bool, num_wanted: int
) -> None:
    """All hidden states, keys and values are finite. The first row of logits, one of the second chunk, is changed."""

    def spoil(_: object, __: object, output: Any) -> None:
        output.logits[0, 0, where] = value

    table = blocks(5)
    without_logits = dataclasses.replace(chunk(prompt(20, seed=1), 0, 20, table[3:]), wants_logits=False)
    spoiled = dataclasses.replace(chunk(prompt(10), 0, 10, table[:1]), wants_all_logits=num_wanted > 1)
    undisturbed = chunk(prompt(20), 0, 20, table[1:3])
    hook = served.model.module.register_forward_hook(spoil)
    try:
        got = served.runner.run([without_logits, spoiled, undisturbed])
    finally:
        hook.remove()
    assert got.is_finite == [True, is_finite, True]
    assert len(got.most_likely) == num_wanted + 1
    assert all(0 <= token_id < VOCAB_SIZE for token_id in got.most_likely)


def test_a_step_without_wanted_logits_returns_none(served: Served) -> None:
    tokens = prompt(20)
    got = served.runner.run([Chunk(tokens.tobytes(), 0, 20, blocks(2), None, wants_logits=False)])
    assert got.logits.shape == (0, VOCAB_SIZE)


@pytest.mark.sampled(one_in=3)
def test_the_model_check_compares_logits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    check_model(served.model, TorchKernels(), BLOCK_SIZE)
    monkeypatch.setitem(LOGITS_TOLERANCE, served.model.kv_shape.dtype, -1.0)
    with pytest.raises(UnsupportedModel, match="over 0 cached tokens"):
        check_model(served.model, TorchKernels(), BLOCK_SIZE)


def test_the_tiny_model_is_the_same_each_time() -> None:
    first, second = load_model(ModelConfig(device="cpu")), load_model(ModelConfig(device="cpu"))
    assert first.fingerprint == second.fingerprint
    assert first.kv_shape.token_bytes == 4 * 2 * 2 * 32 * 4  # layers, K and V, KV heads, head dim, bytes of float32


def test_different_weights_have_different_fingerprints(tmp_path: Path) -> None:
    write_checkpoint(CONFIGS["llama"], tmp_path, max_shard_size="10MB")
    original = load_model(ModelConfig(path=str(tmp_path), device="cpu"))
    model = load_eager(tmp_path)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] += 1
    model.save_pretrained(tmp_path)
    changed = load_model(ModelConfig(path=str(tmp_path), device="cpu"))
    assert original.fingerprint != changed.fingerprint


def test_a_mixture_of_experts_is_served(tmp_path: Path) -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=4)
    write_checkpoint(config, tmp_path, max_shard_size="10MB")
    model = load_model(ModelConfig(path=str(tmp_path), device="cpu"))
    check_model(model, TorchKernels(), BLOCK_SIZE)
    runner = Runner(model, KVStorage(NUM_BLOCKS, BLOCK_SIZE, model.kv_shape, model.device), TorchKernels())
    mixture, tokens = Served(model, runner, load_eager(tmp_path)), prompt(37)
    assert_agree(runner.run([chunk(tokens, 0, 37, blocks(3))]).logits[0], mixture.expected(tokens)[-1])


def test_a_model_that_hides_its_last_states_is_refused() -> None:
    module = load_model(ModelConfig(device="cpu")).module
    module.model.forward = lambda **_: SimpleNamespace(hidden=torch.zeros(1, 16, 256))
    module.forward = lambda **inputs: SimpleNamespace(logits=torch.zeros(1, 1, 512), base=module.model(**inputs))
    with pytest.raises(UnsupportedModel, match="returns its last hidden states, got none"):
        Model("hidden", module, torch.device("cpu"))


@pytest.mark.parametrize(
    ("rope", "max_tokens"),
    [
        ({"rope_type": "default", "rope_theta": 10000.0}, 512),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, 512),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, 512),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [4.0] * 8,
                "original_max_position_embeddings": 128,
            },
            128,
        ),
    ],
    ids=["default", "linear", "dynamic", "longrope"],
)
def test_sequences_end_where_their_rope_would_depend_on_their_length(
    rope: dict[str, object], max_tokens: int, tmp_path: Path
) -> None:
    shape = CONFIGS["llama"].to_dict()
    config = LlamaConfig(**{**shape, "rope_parameters": rope})
    write_checkpoint(config, tmp_path, max_shard_size="10MB")
    assert load_model(ModelConfig(path=str(tmp_path), device="cpu")).max_tokens == max_tokens


@pytest.mark.parametrize(
    ("eos_token_id", "expected"), [(512, set()), (-1, set()), ([5, 50_256, -1, 511], {5, 511}), (0, {0})]
)
def test_eos_tokens_beyond_the_vocabulary_are_ignored(eos_token_id: int | list[int], expected: set[int]) -> None:
    module = build_tiny_model(ATTENTION_NAME)
    module.generation_config.eos_token_id = eos_token_id
    model = Model("tiny", module, torch.device("cpu"))
    assert (model.vocab_size, model.eos_token_ids) == (512, expected)
