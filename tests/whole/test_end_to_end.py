"""The whole service: `radixkv serve` in a separate process, and clients that connect over gRPC."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from radixkv.api.retention import Retention
from radixkv.config import EngineConfig
from radixkv.model.tiny_model import build_tiny_model
from radixkv.planning.trace import load_trace, prompt_tokens
from radixkv.service.client import AsyncClient, Client, logits_of
from radixkv.v1.prefill_pb2 import FinishReason, GenerateResponse, MissReason, PrefillResponse, TokenLogprob, Usage
from tests.cache.walk.reusable_tokens import count_reusable_tokens
from tests.model.exact.checkpoints import CONFIGS, SHAPE, VOCAB_SIZE, load_eager, write_checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving

NUM_TOKEN_IDS = 256  # prompts consist of the ids below this, which every model of these tests knows


@contextmanager
def serving_by_command(*arguments: str, log: Path = Path(os.devnull)) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command `radixkv serve` with its log in a file; yield the process and its address."""
    command = [sys.executable, "-m", "radixkv.service", "serve", "--port", "0", *arguments]
    with (
        log.open("w", encoding="utf-8") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on "), line
            yield process, line.removeprefix("listening on ").strip()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving_by_command() as (_, address):
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> str:
    """A separate tenant for each test, so that its cache is empty."""
    return str(request.node.name)


def random_ids(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, NUM_TOKEN_IDS, count).astype(np.uint32)


def assert_the_cache_changes_no_logit(client: Client, tenant: str) -> None:
    """Compare the logits of twelve prompts, each sent once without the cache and twice, concurrently, with it."""
    system = random_ids(700)
    prompts = [[*system[: 50 * i + 13], *random_ids(5 + 9 * i, seed=i)] for i in range(1, 13)]
    expected = {
        tuple(prompt): client.prefill(prompt, tenant=tenant, read_cache=False, return_logits=True).logits
        for prompt in prompts
    }
    prompts_twice = [*prompts, *reversed(prompts)]
    with ThreadPoolExecutor(8) as threads:
        responses = list(
            threads.map(lambda prompt: client.prefill(prompt, tenant=tenant, return_logits=True), prompts_twice)
        )
    assert sum(response.usage.cached_tokens > 0 for response in responses) >= 12
    assert [response.logits for response in responses] == [expected[tuple(prompt)] for prompt in prompts_twice]


def test_a_cache_hit_changes_no_byte_of_the_logits(client: Client, tenant: str) -> None:
    assert_the_cache_changes_no_logit(client, tenant)


def test_a_cache_hit_changes_no_byte_of_the_logits_with_a_quantized_pool(tmp_path: Path) -> None:
    directory = write_checkpoint(LlamaConfig(**{**SHAPE, "max_position_embeddings": 2048}), tmp_path)
    settings = ("--model", str(directory), "--set", "cache.kv_dtype=k8v4", "--set", "model.dtype=bfloat16")
    with serving(*settings) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        assert_the_cache_changes_no_logit(client, "acme")
        stats = client.stats()
        assert stats.kv_dtype == "k8v4"
        # A key has 8 bits per element and a value 4; each has four further bytes for its scale.
        num_layers, num_kv_heads, head_dim = 3, 2, 16
        bytes_per_head = head_dim + head_dim // 2 + 2 * 4
        assert stats.block_bytes == stats.block_size * num_layers * num_kv_heads * bytes_per_head


def test_a_thousand_simultaneous_cold_requests_compute_their_prefix_once(tmp_path: Path) -> None:
    """The requests are queued behind a long prompt, and a step is large enough to admit many of them."""
    shape = {**SHAPE, "vocab_size": 2000, "max_position_embeddings": 20_000}
    directory = write_checkpoint(LlamaConfig(**shape), tmp_path)
    system = random_ids(2048)
    prompts = [[*system, 1000 + i, *random_ids(63, seed=i)] for i in range(1000)]

    async def prefill_all(address: str) -> list[PrefillResponse]:
        async with AsyncClient(address, timeout_s=500) as client:
            long_prefill = asyncio.create_task(client.prefill(random_ids(16_000, seed=1000), tenant="other"))
            while not (await client.stats()).requests.running:
                await asyncio.sleep(0.01)
            responses = await asyncio.gather(*(client.prefill(ids, tenant="acme") for ids in prompts))
            assert (await long_prefill).usage.computed_tokens == 16_000
            assert (await client.stats()).requests.following == 0
            return responses

    # All messages may be received at once; on a busy machine, messages that wait for a receive slot would be refused.
    settings = ("--set", "engine.max_step_tokens=8192", "--set", "server.max_receiving_bytes=2000000000")
    with serving("--model", str(directory), *settings) as (_, address):
        responses = asyncio.run(prefill_all(address))
    own_tokens = 1000 * (1 + 63)  # of each prompt after the common prefix
    assert sum(response.usage.computed_tokens for response in responses) == 2048 + own_tokens


def test_a_retained_prompt_is_not_evicted_until_it_is_purged() -> None:
    with (
        serving("--set", "cache.capacity_tokens=4096") as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        prompt, tenant = random_ids(640), "acme"
        retained = client.prefill(prompt, tenant=tenant, retention=Retention(80, ttl_s=600)).retained
        assert (retained.granted_tokens, retained.refused_tokens, retained.uncached_tokens) == (640, 0, 0)
        not_cached = client.retain(prompt, Retention(80), tenant="other")
        assert not_cached.retained.uncached_tokens == 640
        for seed in range(1, 10):
            client.prefill(random_ids(1024, seed), tenant="other")
        assert client.probe(prompt, tenant=tenant).cached_tokens == 639
        # A fifth of the 64 blocks, 12, may be retained; 10 are already, so that 2 more are granted.
        partly_granted = client.prefill(random_ids(1024, 99), tenant="other", retention=Retention(90)).retained
        assert (partly_granted.granted_tokens, partly_granted.refused_tokens) == (128, 896)
        assert client.purge(tenant=tenant).freed_blocks == 10
        assert client.probe(prompt, tenant=tenant).cached_tokens == 0
        assert client.stats().blocks.retained == 2


@pytest.mark.parametrize(
    ("retention", "message"),
    [
        (Retention(101), "retention.priority: expected 0 to 100, got 101"),
        (Retention(60, start=3), "retention.start_token: expected 0 to 2, got 3"),
        (Retention(60, start=2, end=1), "retention.end_token: expected 3 to 3, got 1"),
    ],
)
def test_an_invalid_retention_is_refused_before_anything_is_computed(
    client: Client, tenant: str, retention: Retention, message: str
) -> None:
    for call in (client.prefill, client.retain):
        with pytest.raises(grpc.RpcError) as refusal:
            call([1, 2, 3], retention=retention, tenant=tenant)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refusal.value.details().startswith(message)
    assert client.probe([1, 2, 3], tenant=tenant).cached_tokens == 0


def test_one_shared_prefix_is_computed_exactly_once(client: Client, tenant: str) -> None:
    prefix = random_ids(2048)
    prompts = [[*prefix.tolist(), *random_ids(64, seed=i).tolist()] for i in range(1, 21)]
    responses = [client.prefill(prompt, tenant=tenant) for prompt in prompts]
    usages = [response.usage for response in responses]
    assert all(u.cached_tokens + u.computed_tokens == u.prompt_tokens == 2112 for u in usages)
    assert usages[0].cached_tokens == 0
    assert responses[0].miss_reason == MissReason.COLD
    # Reuse does not end at block boundaries: a suffix that happens to begin like an earlier one reuses more tokens.
    assert [u.cached_tokens for u in usages] == count_reusable_tokens(prompts)
    assert all(u.cached_tokens >= 2048 for u in usages[1:])


def write_conversations(path: Path) -> None:
    """Write a Mooncake trace of interleaved turns; some prompts are truncated inside a block, some are repeated."""
    rng = np.random.default_rng(0)
    conversations: list[list[int]] = [[0] for _ in range(8)]
    next_id = 1
    with path.open("w") as trace:
        for request in range(80):
            hash_ids = conversations[rng.integers(8)]
            num_new_ids = int(rng.integers(0, 3))
            hash_ids.extend(range(next_id, next_id + num_new_ids))
            next_id += num_new_ids
            length = 512 * len(hash_ids) - int(rng.integers(0, 511))
            line = {"timestamp": request, "input_length": length, "output_length": 1, "hash_ids": hash_ids}
            trace.write(json.dumps(line) + "\n")


def test_a_conversation_trace_reuses_every_reusable_token(client: Client, tenant: str, tmp_path: Path) -> None:
    """Replay the beginning of a real trace if RADIXKV_TRACE is set."""
    trace = Path(os.environ.get("RADIXKV_TRACE", tmp_path / "trace.jsonl"))
    if not trace.exists():
        write_conversations(trace)
    requests = load_trace(trace, limit=300)
    prompts = [prompt_tokens(request, vocab_size=NUM_TOKEN_IDS, scale=0.02).tolist() for request in requests]
    usages = [client.prefill(prompt, tenant=tenant).usage for prompt in prompts]
    assert [u.cached_tokens for u in usages] == count_reusable_tokens(prompts)
    assert sum(u.cached_tokens for u in usages) > 0


def test_concurrent_requests_get_their_own_results(address: str, tenant: str) -> None:
    prefix = random_ids(300)
    prompts = [[*prefix, *random_ids(1 + i, seed=i)] for i in range(40)]

    def prefill_twice(prompt: list[int]) -> tuple[TokenLogprob, TokenLogprob]:
        """Return the most likely next token, computed with and without the cache."""
        with Client(address, timeout_s=PATIENCE_S) as client:
            cached = client.prefill(prompt, tenant=tenant, top_logprobs=1)
            cold = client.prefill(prompt, tenant=tenant, top_logprobs=1, read_cache=False, write_cache=False)
        assert cached.usage.cached_tokens + cached.usage.computed_tokens == len(prompt)
        assert (cold.usage.cached_tokens, cold.miss_reason) == (0, MissReason.READ_DISABLED)
        return cached.top_logprobs[0], cold.top_logprobs[0]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(prefill_twice, prompts))
    assert all(cached == cold for cached, cold in results)
    assert len({cached.logprob for cached, _ in results}) > 30, "the prompts differ, and so do their results"


def test_tenants_and_salts_are_isolated(client: Client, tenant: str) -> None:
    prompt = random_ids(200)

    def num_cached(**identity: str) -> int:
        return int(client.prefill(prompt, **identity).usage.cached_tokens)

    assert num_cached(tenant=tenant) == 0
    assert num_cached(tenant=tenant) == 199, "the positive control: the prompt is cached for its own namespace"
    assert num_cached(tenant=tenant + "x") == 0
    assert num_cached(tenant=tenant, salt="s") == 0
    assert num_cached(tenant=tenant, salt="s") == 199
    assert client.probe(prompt, tenant=tenant).cached_tokens == 199
    assert client.probe(prompt, tenant=tenant, salt="other").cached_tokens == 0


def test_a_held_lease_is_described_and_can_be_released_once(client: Client, tenant: str) -> None:
    prompt, before_s = random_ids(130), time.time()
    held = client.prefill(prompt, tenant=tenant, hold_lease=True, return_block_table=True)
    assert len(held.block_table) == 3 == len(set(held.block_table)), "blocks of 64 for 130 tokens"
    assert held.block_size == 64
    ttl_s = EngineConfig().held_lease_ttl_s
    assert before_s + ttl_s - 1 < held.lease_expires_at.seconds < time.time() + ttl_s + 1
    renewed = client.renew(held.lease_id, tenant=tenant)
    assert renewed.lease_expires_at.ToNanoseconds() > held.lease_expires_at.ToNanoseconds()
    client.release(held.lease_id, tenant=tenant)
    with pytest.raises(grpc.RpcError) as refused:
        client.release(held.lease_id, tenant=tenant)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("ids", "fields", "code", "message"),
    [
        ([], {}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids: expected at least 1 token"),
        ([1, 512], {}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids[1]"),
        ([1] * 131_073, {}, grpc.StatusCode.INVALID_ARGUMENT, "at most 131072 tokens, got 131073"),
        ([1], {"adapter": "unknown"}, grpc.StatusCode.NOT_FOUND, "adapter"),
        ([1], {"tenant": "t" * 257}, grpc.StatusCode.INVALID_ARGUMENT, "tenant: expected at most 256"),
    ],
    ids=["empty", "outside the vocabulary", "too long", "adapter", "tenant"],
)
def test_an_invalid_request_is_refused_by_field_and_the_next_one_is_served(
    client: Client, tenant: str, ids: list[int], fields: dict[str, str], code: grpc.StatusCode, message: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        client.prefill(ids, **fields)
    assert refused.value.code() == code
    assert message in refused.value.details()
    assert client.prefill([1, 2, 3], tenant=tenant).usage.prompt_tokens == 3


def test_a_client_that_is_killed_leaves_no_block_behind(client: Client, address: str, tenant: str) -> None:
    before = client.stats()
    script = (
        "import sys; from radixkv.service.client import Client\n"
        "Client(sys.argv[1]).prefill([7] * 60_000, read_cache=False, write_cache=False)"
    )
    with subprocess.Popen([sys.executable, "-c", script, address], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: client.stats().blocks.leased > 0)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: client.stats().requests.cancelled == before.requests.cancelled + 1)
    after = client.stats()
    assert after.blocks.leased == 0
    assert after.blocks.free == before.blocks.free
    assert client.prefill([1, 2, 3], tenant=tenant).usage.prompt_tokens == 3


def test_a_deadline_aborts_a_long_prefill(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        client.prefill([9] * 60_000, read_cache=False, write_cache=False, timeout_s=0.3)
    assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: client.stats().blocks.leased == 0)


def test_a_full_pool_evicts_and_a_held_lease_expires() -> None:
    settings = (
        "cache.capacity_tokens=1024",
        "cache.max_held_share=1",
        "default_tenant.max_held_tokens=640",
        "engine.held_lease_ttl_s=0.1",
    )
    with (
        serving(*itertools.chain.from_iterable(("--set", each) for each in settings)) as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        prompts = [random_ids(600, seed=i) for i in range(4)]
        for prompt in prompts:
            assert client.prefill(prompt).usage.computed_tokens == 600
        assert client.prefill(prompts[-1]).usage.cached_tokens == 599
        assert client.prefill(prompts[0]).miss_reason == MissReason.EVICTED
        stats = client.stats()
        assert stats.evicted_blocks > 0
        assert stats.blocks.total == stats.blocks.free + stats.blocks.leased + stats.blocks.published == 16
        with pytest.raises(grpc.RpcError) as refused:
            client.prefill(random_ids(641, seed=9), hold_lease=True)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.prefill(prompts[0], hold_lease=True).lease_id
        wait_until(lambda: client.stats().held_leases == 0)


def test_logits_over_the_wire_agree_with_transformers(tmp_path: Path) -> None:
    directory = write_checkpoint(CONFIGS["qwen3"], tmp_path)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, 150)
    with torch.inference_mode():
        expected = load_eager(directory)(torch.from_numpy(ids)[None], use_cache=False).logits[0, -1].numpy()
    with (
        serving("--model", str(directory), "--set", "cache.block_size=16") as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        cold = client.prefill(ids, return_logits=True)
        client.prefill([*ids[:77], 5, 6])
        client.prefill(ids, salt="again")
        warm = client.prefill(ids, return_logits=True, salt="again")
    assert warm.usage.cached_tokens == 149
    assert np.abs(logits_of(cold) - expected).max() <= 1e-4
    assert np.abs(logits_of(warm) - expected).max() <= 1e-4


def test_sigterm_lets_a_running_request_finish_and_exits_0(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        serving_by_command("--set", f"server.drain_timeout_s={PATIENCE_S}", log=log) as (process, address),
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        stream = client.generate([3] * 100, max_new_tokens=500, ignore_eos=True)
        first_chunk = next(stream)
        process.send_signal(signal.SIGTERM)
        tokens, last = read_all(itertools.chain([first_chunk], stream))
        assert len(tokens) == last.usage.generated_tokens == 500
        assert process.wait(PATIENCE_S) == 0
    assert log.read_text(encoding="utf-8").endswith("stopped\n"), "nothing is logged after the end"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "/nowhere"],
            "model.path: expected `tiny`, a directory with a config.json, a GGUF file, or ORG/NAME",
        ),
        (["--set", "cache.blok_size=16"], "cache.blok_size: unknown key; the nearest is cache.block_size"),
        (["--set", "cache.block_size=17"], "cache.block_size: expected one of 16, 32, 64, got 17"),
        (["--config", "/nowhere.toml"], "config file /nowhere.toml"),
    ],
)
def test_a_server_that_cannot_start_prints_one_line_with_the_reason(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "radixkv.service", "serve", "--port", "0", *arguments]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("host", "shown_host", "flag", "key"),
    [
        ("127.0.0.1", "127.0.0.1", "--port", "server.port"),
        ("127.0.0.1", "127.0.0.1", "--metrics-port", "server.metrics_port"),
        ("::1", "[::1]", "--port", "server.port"),
    ],
)
def test_an_address_in_use_is_refused_before_a_model_is_loaded(host: str, shown_host: str, flag: str, key: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "radixkv.service", "serve", "--host", host, flag, str(port)]
        command += [] if flag == "--port" else ["--port", "0"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 2
    assert "importing PyTorch" not in ended.stderr
    address = f"{shown_host}:{port}"
    refusal = f"radixkv: server.host, {key}: expected a free address of this machine, got {address}"
    assert ended.stderr.splitlines()[-1] == refusal


def read_all(stream: Iterable[GenerateResponse]) -> tuple[list[int], GenerateResponse]:
    """Return all tokens of a generation, and its last response."""
    chunks = list(stream)
    assert [chunk.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.HasField("usage") for chunk in (chunks[0], chunks[-1]))
    return [token_id for chunk in chunks for token_id in chunk.token_ids], chunks[-1]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_generation_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    directory = write_checkpoint(CONFIGS[name], tmp_path)
    ids = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 70))
    with torch.inference_mode():
        expected = load_eager(directory).generate(
            torch.from_numpy(ids),
            attention_mask=torch.ones(3, 70, dtype=torch.int64),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[:, 70:]
    with (
        serving("--model", str(directory), "--set", "cache.block_size=16") as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
        ThreadPoolExecutor(3) as threads,
    ):
        for _ in range(2):  # cold and warm
            results = threads.map(lambda row: read_all(client.generate(row, max_new_tokens=40, ignore_eos=True)), ids)
            assert [tokens for tokens, _ in results] == expected.tolist()
        expected_tokens = expected[0].tolist()
        stop_id = expected_tokens[9]
        stopped, last = read_all(client.generate(ids[0], max_new_tokens=40, stop_token_ids=[stop_id], ignore_eos=True))
        assert stopped == expected_tokens[: expected_tokens.index(stop_id) + 1]
        assert last.finish_reason == FinishReason.STOP


def test_generation_ends_at_the_models_eos_token_unless_it_is_ignored(tmp_path: Path) -> None:
    directory = write_checkpoint(CONFIGS["llama"], tmp_path)
    with serving("--model", str(directory)) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        tokens, _ = read_all(client.generate([1, 2, 3], max_new_tokens=30, ignore_eos=True))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**config, "eos_token_id": [299, tokens[7]]}))
    with serving("--model", str(directory)) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        ended, last = read_all(client.generate([1, 2, 3], max_new_tokens=30))
        assert ended == tokens[: tokens.index(tokens[7]) + 1]
        assert last.finish_reason == FinishReason.STOP
        assert read_all(client.generate([1, 2, 3], max_new_tokens=30, ignore_eos=True))[0] == tokens


def test_the_next_turn_of_a_conversation_reuses_the_completion(client: Client, tenant: str) -> None:
    turn = random_ids(100).tolist()
    answer, last = read_all(client.generate(turn, max_new_tokens=50, tenant=tenant))
    usage = last.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (100, 0, 50)
    assert usage.written_tokens == 149, "the K/V of the last generated token is never computed"
    assert last.timing.decode_us > 0
    _, last = read_all(client.generate([*turn, *answer, 1, 2, 3], max_new_tokens=5, tenant=tenant))
    assert last.usage.cached_tokens == 149


def test_a_seed_gives_the_same_tokens_in_any_batch_and_pool(client: Client) -> None:
    def generate(client: Client, seed: int) -> list[int]:
        options = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 60}
        if seed % 2:
            options |= {"top_k": 50, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "min_tokens": 60}
        return read_all(client.generate(random_ids(60, seed), seed=seed, **options))[0]

    expected = [generate(client, seed) for seed in range(4)]
    with (
        serving("--set", "cache.capacity_tokens=256") as (
            _,
            address,
        ),  # half of what the four generations need together
        Client(address, timeout_s=PATIENCE_S) as client_of_small_pool,
        ThreadPoolExecutor(4) as threads,
    ):
        assert list(threads.map(lambda seed: generate(client_of_small_pool, seed), range(4))) == expected
        assert client_of_small_pool.stats().requests.pauses > 0, "requests were preempted"
        assert client_of_small_pool.stats().tokens.recomputed > 0


def test_completions_of_one_prompt_share_it_and_equal_those_of_single_calls(client: Client, tenant: str) -> None:
    prompt = random_ids(200).tolist()
    options = {"temperature": 1.0, "max_new_tokens": 20, "tenant": tenant}
    chunks = list(client.generate(prompt, n=4, seed=5, **options))
    completions: list[list[int]] = [[], [], [], []]
    usages = [Usage() for _ in range(4)]
    for chunk in chunks:
        completions[chunk.index] += chunk.token_ids
        usages[chunk.index] = chunk.usage
    single_calls = [read_all(client.generate(prompt, seed=5 + index, **options)) for index in range(4)]
    assert completions == [tokens for tokens, _ in single_calls]
    assert sorted(usage.computed_tokens for usage in usages) == [1, 1, 1, 200]


def test_penalties_and_log_probabilities_agree_with_transformers(client: Client) -> None:
    prompt = random_ids(70).tolist()
    with torch.inference_mode():
        expected = build_tiny_model("eager").generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 70, dtype=torch.long),
            do_sample=False,
            max_new_tokens=40,
            repetition_penalty=1.3,
            sequence_bias=[[[7], 4.0], [[9], -4.0]],
            output_logits=True,
            return_dict_in_generate=True,
        )
    expected_ids = expected.sequences[0, 70:].tolist()
    options = {"max_new_tokens": 40, "repetition_penalty": 1.3, "logit_bias": {7: 4.0, 9: -4.0}, "logprobs": 2}
    cold, warm = (list(client.generate(prompt, **options)) for _ in range(2))
    for chunks in (cold, warm):
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected_ids
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        for token_id, actual, logits in zip(expected_ids, logprobs, expected.logits, strict=True):
            row = logits[0].log_softmax(0)
            assert actual.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            assert [top.logprob for top in actual.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
    assert cold[-1].logprobs[-1] == warm[-1].logprobs[-1]
    assert warm[0].usage.cached_tokens > 0


def test_prompt_log_probabilities_agree_with_transformers(client: Client, tenant: str) -> None:
    prompt = random_ids(150).tolist()
    with torch.inference_mode():
        rows = build_tiny_model("eager")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    client.prefill(prompt, tenant=tenant)
    chunks = list(client.generate(prompt, max_new_tokens=3, prompt_logprobs=2, logprobs=0, n=2, tenant=tenant))
    (first,) = [chunk for chunk in chunks if chunk.prompt_logprobs]  # one chunk only, though there are two completions
    assert (first.index, first.usage.cached_tokens) == (0, 0), "the logits of a prompt are not cached"
    for row, token_id, actual in zip(rows[:-1], prompt[1:], first.prompt_logprobs, strict=True):
        assert actual.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        assert [top.logprob for top in actual.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)
    repeated = next(client.generate(prompt, max_new_tokens=1, prompt_logprobs=2, tenant=tenant))
    assert list(repeated.prompt_logprobs) == list(first.prompt_logprobs), "a second call must compute the same bits"


def test_a_client_that_stops_reading_aborts_its_generation(client: Client, tenant: str) -> None:
    before = client.stats().requests.cancelled
    stream = client.generate(random_ids(10), max_new_tokens=100_000, tenant=tenant)
    assert len(next(stream).token_ids) > 0
    stream.close()
    wait_until(lambda: client.stats().requests.cancelled == before + 1)
    assert client.stats().blocks.leased == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: expected a finite number from 0, got -1.0"),
        ({"top_p": 0.0}, "top_p: expected more than 0 and at most 1, got 0.0"),
        ({"stop_token_ids": [600]}, "stop_token_ids: expected ids from 0 to below the vocabulary size 512, got 600"),
        (
            {"max_new_tokens": 131_072},
            "prefill.token_ids, max_new_tokens: expected at most 131008 tokens together, got",
        ),
        ({"urgency": 101}, "priority: expected an urgency of 0 to 100, got 101"),
    ],
)
def test_invalid_generation_parameters_are_refused_by_name(
    client: Client, tenant: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(client.generate([1, 2, 3], tenant=tenant, **fields))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(message)
    assert client.probe([1, 2, 3], tenant=tenant).cached_tokens == 0
