"""Compressed generations: their output, the blocks that they hold, and their isolation from other requests."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.result import GenerateResult, GenerationFuture
from radixkv.api.retention import Retention
from radixkv.cache.tenants import Quota
from radixkv.compute.forward import Chunk
from radixkv.compute.kept_entries import KeptEntries
from radixkv.engine.compression import rule_of
from radixkv.errors import DeadlinePassed, QuotaExceeded, StepFailed
from radixkv.model.model import Model
from radixkv.namespace import Namespace
from tests.core_bench import purge_at_once
from tests.engine.compressed_bench import BLOCK_SIZE, CompressedBench, load, overwrite_free_blocks, prompt
from tests.engine.compression_oracle import oracle_logits
from tests.fake_runner import tokens
from tests.model.exact.checkpoints import CONFIGS, load_eager, write_checkpoint
from tests.model.exact.exact_cases import MODELS

STREAMING_LLM, H2O, SNAPKV = CompressionPolicy
COMPRESSIONS = [Compression(STREAMING_LLM, 16), Compression(H2O, 16), Compression(SNAPKV, 16, window=6)]
each_policy = pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda each: each.policy)
MAX_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(CONFIGS["llama"], tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load(directory)


def result_of(future: GenerationFuture) -> GenerateResult:
    """Return the result with the log probabilities of all its tokens."""
    result, streamed = future.result(0), future.streamed_logprobs  # type: ignore[attr-defined]
    return dataclasses.replace(result, logprobs=(*streamed, *result.logprobs))


def output_of(result: GenerateResult) -> tuple[object, ...]:
    """Return tokens and log probabilities, in which a different bit of the K/V is noticed."""
    return result.token_ids, result.logprobs


@functools.cache
def generate_alone(
    model: Model, length: int, count: int, compression: Compression | None, seed: int = 0
) -> GenerateResult:
    """Return what a generation of `count` tokens returns on an engine of its own."""
    bench = CompressedBench(model)
    future = bench.generate(prompt(length, seed), count, compression)
    bench.run()
    return result_of(future)


def cold_logits(model: Model, ids: list[int]) -> np.ndarray:
    """Return the logits after a prompt that is computed without a cache."""
    logits = CompressedBench(model).prefill(ids).logits
    assert logits is not None
    return logits


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "compression",
    [*COMPRESSIONS, Compression(STREAMING_LLM, 9, num_sinks=0), Compression(H2O, 48, window=3), Compression(SNAPKV, 2)],
    ids=lambda each: f"{each.policy}-{each.max_tokens}",
)
@pytest.mark.parametrize("length", [5, 50])
def test_the_output_is_that_of_transformers_without_the_dropped_entries(
    model: Model, directory: Path, compression: Compression, length: int
) -> None:
    result = generate_alone(model, length, 16, compression)
    logits = oracle_logits(load_eager(directory), prompt(length), list(result.token_ids), compression)
    expected = torch.log_softmax(logits, dim=-1)[range(16), list(result.token_ids)]
    streamed = torch.tensor([each.logprob for each in result.logprobs])
    assert (streamed - expected).abs().max() < MAX_DIFFERENCE
    assert logits.argmax(dim=-1).tolist() == list(result.token_ids)
    assert logits.std() > 100 * MAX_DIFFERENCE, "the oracle's logits are too flat to tell right from wrong"


@pytest.mark.sampled(one_in=3)
@each_policy
def test_the_output_of_latent_attention_is_that_of_transformers_too(tmp_path: Path, compression: Compression) -> None:
    directory = write_checkpoint(MODELS["deepseek_v3"], tmp_path)
    result = generate_alone(load(directory), 50, 24, compression)
    logits = oracle_logits(load_eager(directory), prompt(50), list(result.token_ids), compression)
    expected = torch.log_softmax(logits, dim=-1)[range(24), list(result.token_ids)]
    assert (torch.tensor([each.logprob for each in result.logprobs]) - expected).abs().max() < MAX_DIFFERENCE
    assert logits.std() > 100 * MAX_DIFFERENCE


@pytest.mark.sampled(one_in=3)
@each_policy
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "k8v4"])
def test_no_bit_changes_if_nothing_is_dropped(model: Model, compression: Compression, kv_dtype: str) -> None:
    bench = CompressedBench(model, kv_dtype=kv_dtype)
    loose = Compression(compression.policy, 60)
    whole, compressed = bench.generate(prompt(40), 20), bench.generate(prompt(40), 20, loose)
    bench.run()
    assert output_of(result_of(compressed)) == output_of(result_of(whole))
    tight = bench.generate(prompt(40), 20, compression)
    bench.run()
    assert output_of(result_of(tight)) != output_of(result_of(whole))


@each_policy
def test_batching_hits_and_chunks_change_no_bit(model: Model, compression: Compression) -> None:
    expected = output_of(generate_alone(model, 50, 20, compression))
    bench = CompressedBench(model, num_blocks=256, max_step_tokens=7)
    bench.prefill(prompt(50)[:29])
    futures = [bench.generate(prompt(50), 20, compression) for _ in range(2)]
    others = [
        bench.generate(prompt(33, seed=seed), 30, each) for seed, each in enumerate([None, *COMPRESSIONS], start=1)
    ]
    bench.run()
    assert [output_of(result_of(future)) for future in futures] == [expected, expected]
    assert all(len(result_of(other).token_ids) == 30 for other in others)
    assert result_of(futures[1]).usage.cached_tokens >= 29


@each_policy
def test_no_other_request_matches_the_output_of_a_compressed_generation(model: Model, compression: Compression) -> None:
    bench = CompressedBench(model)
    future = bench.generate(prompt(50), 30, compression)
    num_published = []  # after each step
    while bench.core.has_work:
        bench.step()
        num_published.append(bench.cache.pool.num_published)
    num_prompt_blocks = -(-50 // BLOCK_SIZE)
    assert set(num_published[1:]) == {num_prompt_blocks}, "the blocks of the prompt, and none of the output"
    usage = result_of(future).usage
    assert (usage.written_tokens, usage.generated_tokens) == (50, 30)
    conversation = [*prompt(50), *result_of(future).token_ids]
    for length in (51, 52, 60, 80):
        overwrite_free_blocks(bench)
        ids = conversation[:length]
        turn = bench.prefill(ids, write_cache=False)
        assert turn.usage.cached_tokens == min(50, length - 1)
        assert turn.logits is not None
        assert turn.logits.tobytes() == cold_logits(model, ids).tobytes()


@each_policy
def test_the_next_turn_of_a_compressed_conversation_is_computed_from_the_whole_prompt(
    model: Model, compression: Compression
) -> None:
    bench = CompressedBench(model)
    first = bench.generate(prompt(30), 12, compression)
    bench.run()
    ids = [*prompt(30), *result_of(first).token_ids, 5, 6]
    second = bench.generate(ids, 12, compression)
    bench.run()
    assert result_of(second).usage.cached_tokens == 30
    fresh = CompressedBench(model)
    expected = fresh.generate(ids, 12, compression)
    fresh.run()
    assert output_of(result_of(second)) == output_of(result_of(expected))


@each_policy
def test_a_compressed_generation_holds_no_more_blocks_than_its_budget(model: Model, compression: Compression) -> None:
    bench = CompressedBench(model)
    bench.generate(prompt(200), 40, compression)
    bench.step()
    assert bench.num_leased_blocks >= 50, (
        "the blocks of the prompt and those for the kept entries, until the prompt is computed"
    )
    bench.step()
    num_entries = compression.max_entries(200, 40)
    assert bench.num_leased_blocks == -(-num_entries // BLOCK_SIZE)
    assert bench.cache.evict(1000) == 50, "no lease holds the prompt any more"
    bench.run()
    assert bench.num_leased_blocks == 0


def test_a_generation_may_be_longer_than_the_pool(model: Model) -> None:
    bench = CompressedBench(model, num_blocks=12)
    future = bench.generate(prompt(20), 100, Compression(STREAMING_LLM, 24))
    bench.run()
    assert len(result_of(future).token_ids) == 100
    assert bench.num_leased_blocks == 0


@pytest.mark.sampled(one_in=3)
@each_policy
def test_other_requests_are_preempted_and_a_compressed_one_is_not(model: Model, compression: Compression) -> None:
    num_compressed_blocks = -(-compression.max_entries(20, 40) // BLOCK_SIZE)
    bench = CompressedBench(model, num_blocks=20 + num_compressed_blocks)  # the others need 30 together
    compression_of = [None, None, compression]  # by seed
    futures = [bench.generate(prompt(20, seed), 40, each) for seed, each in enumerate(compression_of)]
    bench.run()
    results = [result_of(future) for future in futures]
    assert results[2].usage.recomputed_tokens == 0
    assert sum(result.usage.recomputed_tokens for result in results) > 0
    for seed, result in enumerate(results):
        assert output_of(result) == output_of(generate_alone(model, 20, 40, compression_of[seed], seed))


def test_at_most_half_of_the_running_requests_are_compressed_so_that_others_are_served(model: Model) -> None:
    bench = CompressedBench(model, max_running_requests=2)
    greedy = [bench.generate(prompt(9, seed), 30, COMPRESSIONS[0], tenant="greedy") for seed in range(3)]
    for _ in range(3):
        bench.step()
    other = bench.generate(prompt(9, 9), 3, tenant="other")
    while not other.done():
        bench.step()
    assert not any(future.done() for future in greedy)
    bench.run()
    assert all(len(result_of(future).token_ids) == 30 for future in greedy)


def test_blocks_of_a_compressed_generation_count_against_the_ceiling_of_its_tenant(model: Model) -> None:
    bench = CompressedBench(model, quotas={"small": Quota(ceiling_blocks=12)})
    futures = [bench.generate(prompt(30, seed), 9, COMPRESSIONS[0], tenant="small") for seed in range(3)]
    while bench.core.has_work:
        bench.step()
        usage = bench.cache.tenants["small"]
        assert usage.num_leased_blocks + usage.num_cached_blocks <= 12
    assert all(len(result_of(future).token_ids) == 9 for future in futures)
    too_large = bench.generate(prompt(40), 9, COMPRESSIONS[0], tenant="small")
    bench.run()
    assert isinstance(too_large.exception(0), QuotaExceeded)
    assert bench.num_leased_blocks == 0


@pytest.mark.sampled(one_in=3)
@each_policy
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_a_cancelled_generation_leaves_nothing_behind(model: Model, compression: Compression, num_steps: int) -> None:
    bench = CompressedBench(model)
    cancelled = bench.generate(prompt(50), 20, compression)
    other = bench.generate(prompt(40), 20, compression)
    for _ in range(num_steps):
        bench.step()
    cancelled.cancel()
    bench.run()
    assert output_of(result_of(other)) == output_of(generate_alone(model, 40, 20, compression))
    assert bench.num_leased_blocks == 0


@each_policy
def test_a_generation_beyond_its_deadline_leaves_nothing_behind(model: Model, compression: Compression) -> None:
    bench = CompressedBench(model)
    future = bench.generate(prompt(50), 300, compression, deadline_s=60.0)
    bench.run()
    assert isinstance(future.exception(0), DeadlinePassed)
    assert bench.num_leased_blocks == 0


@pytest.mark.sampled(one_in=4)
@each_policy
@pytest.mark.parametrize(("num_steps", "read_cache"), [(0, True), (0, False), (1, True), (1, False), (4, True)])
def test_a_purge_affects_the_prompt_of_a_generation_and_not_its_output(
    model: Model, compression: Compression, num_steps: int, read_cache: bool
) -> None:
    bench = CompressedBench(model)
    future = bench.generate(prompt(50), 20, compression, read_cache=read_cache)
    for _ in range(num_steps):
        bench.step()
    purge_at_once(bench.core, tenant="")
    bench.run()
    assert output_of(result_of(future)) == output_of(generate_alone(model, 50, 20, compression))
    assert bench.cache.pool.num_published == 0
    assert bench.num_leased_blocks == 0


@each_policy
@pytest.mark.parametrize(("write_cache", "num_cached"), [(True, 49), (False, 0)])
def test_a_generation_that_must_not_read_the_cache_publishes_its_prompt_if_it_may_write(
    model: Model, compression: Compression, write_cache: bool, num_cached: int
) -> None:
    bench = CompressedBench(model)
    future = bench.generate(prompt(50), 20, compression, read_cache=False, write_cache=write_cache)
    bench.run()
    assert output_of(result_of(future)) == output_of(generate_alone(model, 50, 20, compression))
    assert result_of(future).usage.written_tokens == (50 if write_cache else 0)
    assert bench.prefill(prompt(50)).usage.cached_tokens == num_cached


def test_choosing_entries_writes_nothing_into_the_blocks_of_the_prompt(model: Model) -> None:
    bench = CompressedBench(model)
    bench.prefill(prompt(50))
    pool = bench.runner.storage.pool
    pool.values.mul_(0.5)  # choosing entries computes K and V again; if it wrote them, the pool would change
    before = pool.blocks.clone()
    match = bench.cache.match(Namespace("model"), tokens([*prompt(50), 0]))  # a prompt's last token is never matched
    rule = rule_of(COMPRESSIONS[2])
    chunk = Chunk(tokens(prompt(50)), 0, 50, match.block_ids.copy(), None, wants_logits=False)
    private_blocks = np.array([100, 101, 102, 103], dtype=np.int32)
    KeptEntries.of_prompt(bench.runner, rule, chunk, private_blocks)
    other_blocks = np.setdiff1d(np.arange(128), private_blocks)
    assert torch.equal(pool.blocks[other_blocks], before[other_blocks])
    assert not torch.equal(pool.blocks[private_blocks], before[private_blocks])


@pytest.mark.parametrize("priority", [0, 80])
def test_the_prompt_of_a_compressed_generation_can_be_retained(model: Model, priority: int) -> None:
    bench = CompressedBench(model)
    future = bench.generate(prompt(48), 10, COMPRESSIONS[0], retention=Retention(priority))
    bench.run()
    retained = result_of(future).retained
    assert retained is not None
    assert retained.grant.granted_tokens == 48
    assert bench.cache.num_retained_blocks == (12 if priority == 80 else 0)


def test_a_request_that_fails_to_be_compressed_fails_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CompressedBench(model)
    failing, other = bench.generate(prompt(50), 20, COMPRESSIONS[1]), bench.generate(prompt(40), 20)
    bench.step()

    def raise_error(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(KeptEntries, "of_prompt", raise_error)
    bench.run()
    assert isinstance(failing.exception(0), StepFailed)
    assert output_of(result_of(other)) == output_of(generate_alone(model, 40, 20, None))
    assert bench.num_leased_blocks == 0


def test_attention_of_a_step_that_is_repeated_after_running_out_of_memory_counts_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = output_of(generate_alone(model, 50, 20, COMPRESSIONS[1]))
    bench = CompressedBench(model)
    future = bench.generate(prompt(50), 20, COMPRESSIONS[1])
    for _ in range(5):
        bench.step()
    start, failures = bench.runner.start, [torch.OutOfMemoryError("full")]

    def fail_after_the_pass(chunks: object) -> object:
        wait = start(chunks)

        def wait_and_fail_once() -> object:
            result = wait()
            if failures:
                raise failures.pop()
            return result

        return wait_and_fail_once

    other = bench.generate(prompt(9, seed=3), 2)  # so that the step has two tokens, and can be made smaller
    monkeypatch.setattr(bench.runner, "start", fail_after_the_pass)
    bench.run()
    assert not failures
    assert output_of(result_of(future)) == expected
    assert len(result_of(other).token_ids) == 2


@pytest.mark.parametrize(("name", "refused"), [("mistral", "sliding windows"), ("qwen3", ""), ("gemma2", "windows")])
def test_a_model_with_sliding_windows_refuses_compression(tmp_path: Path, name: str, refused: str) -> None:
    bench = CompressedBench(load(write_checkpoint(CONFIGS[name], tmp_path)))
    assert refused in bench.runner.compression_refusal
    assert bool(refused) == bool(bench.runner.compression_refusal)
