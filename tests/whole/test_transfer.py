"""Disaggregated prefill: one server computes a prompt, another fetches its K/V and generates the same tokens."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from radixkv.service.client import Client, Compression, CompressionPolicy, KVSource
from radixkv.v1.prefill_pb2 import PrefillResponse
from tests.forked_process import ForkedProcess
from tests.model.exact.checkpoints import write_checkpoint
from tests.model.exact.exact_cases import MODELS
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving

_BLOCK_SIZE, _TENANT = 64, "acme"
SENDS_KV = ("--set", "transfer.serve=true")
# A block object is a head, which ends with a salt and a message authentication code; the tokens; the K/V; a checksum.
_HEAD_BYTES, _TOKENS_BYTES, _CHECKSUM_BYTES = 128, 4 * _BLOCK_SIZE, 16
_SALT_AND_MAC = slice(96, 128)


def prompt(seed: int, num_tokens: int = 5 * _BLOCK_SIZE + 17) -> list[int]:
    """Return a prompt, by default of five whole blocks and 17 further tokens."""
    return [seed % 500, *random.Random(seed).choices(range(500), k=num_tokens - 1)]


def fetching_from(*addresses: str) -> tuple[str, ...]:
    """Return the options of a server that fetches K/V from these servers."""
    sources = [f"kv_sources.s{index}" for index in range(len(addresses))]
    settings = [f"{source}.address={address}" for source, address in zip(sources, addresses, strict=True)]
    settings += [f"{source}.trusted=true" for source in sources]
    return tuple(argument for setting in settings for argument in ("--set", setting))


class Pair(NamedTuple):
    """The clients of a prefill server and of a decode server; the address and the process are those of the former."""

    prefill: Client
    decode: Client
    address: str
    process: ForkedProcess

    def hold(self, tokens: list[int], **options: str) -> tuple[PrefillResponse, KVSource]:
        """Prefill a prompt on the prefill server, and hold its lease, as a source of K/V."""
        held = self.prefill.prefill(tokens, tenant=_TENANT, hold_lease=True, **options)
        return held, KVSource(address=self.address, lease_id=held.lease_id, epoch=held.epoch)


def write_secret(folder: Path, secret: str = "a secret of both servers") -> tuple[str, str]:
    """Write a secret into a file; return the options of a server that uses it."""
    (folder / "secret").write_text(secret)
    return "--set", f"tiers.secret_file={folder}/secret"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    secret = write_secret(tmp_path_factory.mktemp("pair"))
    with (
        serving(*SENDS_KV, *secret) as (process, address),
        serving(*fetching_from(address, "127.0.0.1:1"), *secret) as (_, decode_address),
        Client(address, timeout_s=PATIENCE_S) as prefill,
        Client(decode_address, timeout_s=PATIENCE_S) as decode,
    ):
        yield Pair(prefill, decode, address, process)


def generate(client: Client, tokens: list[int], source: KVSource | None = None, **options) -> tuple[list[int], object]:
    """Return the tokens of a generation and the usage of its prompt."""
    chunks = list(client.generate(tokens, tenant=_TENANT, max_new_tokens=12, kv_source=source, **options))
    return [token_id for chunk in chunks for token_id in chunk.token_ids], chunks[0].usage


def refusal(client: Client, tokens: list[int], source: KVSource) -> tuple[grpc.StatusCode, str]:
    """Return the status and the message with which a generation fails."""
    with pytest.raises(grpc.RpcError) as caught:
        generate(client, tokens, source)
    return caught.value.code(), caught.value.details()


def test_servers_with_roles_only_accept_their_calls() -> None:
    tokens = prompt(70)
    with (
        serving("--role", "prefill") as (_, address),
        serving("--role", "decode", *fetching_from(address)) as (_, decode_address),
        Client(address, timeout_s=PATIENCE_S) as prefill,
        Client(decode_address, timeout_s=PATIENCE_S) as decode,
    ):
        held = prefill.prefill(tokens, tenant=_TENANT, hold_lease=True)
        source = KVSource(address=address, lease_id=held.lease_id, epoch=held.epoch)
        answer, usage = generate(decode, tokens, source)
        assert (answer[0], usage.remote_tokens) == (held.next_token_id, 5 * _BLOCK_SIZE)
        assert refusal(prefill, tokens, source) == (
            grpc.StatusCode.UNIMPLEMENTED,
            "Generate: this server does not offer it, because its transfer.role is prefill",
        )
        with pytest.raises(grpc.RpcError) as caught:
            decode.prefill(tokens, tenant=_TENANT)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_completions_equal_those_of_one_server_that_does_both(pair: Pair) -> None:
    for seed in range(8):
        tokens = prompt(seed)
        expected, _ = generate(pair.prefill, tokens, temperature=0.9, seed=seed)
        _, source = pair.hold(tokens)
        answer, usage = generate(pair.decode, tokens, source, temperature=0.9, seed=seed)
        assert answer == expected
        assert (usage.remote_tokens, usage.cached_tokens, usage.computed_tokens) == (
            5 * _BLOCK_SIZE,
            5 * _BLOCK_SIZE,
            17,
        )
        pair.prefill.release(source.lease_id, tenant=_TENANT)


def test_fetched_latents_are_bitwise_identical(tmp_path: Path) -> None:
    model_option = ("--model", str(write_checkpoint(MODELS["deepseek_v3"], tmp_path)))
    tokens = [each % 300 for each in prompt(3)]
    with (
        serving(*model_option, *SENDS_KV) as (_, address),
        Client(address, timeout_s=PATIENCE_S) as prefill,
        serving(*model_option, *fetching_from(address)) as (_, decode_address),
        Client(decode_address, timeout_s=PATIENCE_S) as decode,
    ):
        expected, _ = generate(prefill, tokens, ignore_eos=True)
        held = prefill.prefill(tokens, tenant=_TENANT, hold_lease=True)
        source = KVSource(address=address, lease_id=held.lease_id, epoch=held.epoch)
        answer, usage = generate(decode, tokens, source, ignore_eos=True)
        assert (len(answer), answer) == (12, expected)
        assert (usage.remote_tokens, usage.computed_tokens) == (5 * _BLOCK_SIZE, 17)
        num_layers, latent_size, rope_size, float32_bytes = 3, 40, 8, 4
        assert decode.stats().block_bytes == _BLOCK_SIZE * num_layers * (latent_size + rope_size) * float32_bytes


def test_cached_tokens_are_not_fetched(pair: Pair) -> None:
    tokens = prompt(100)
    _, source = pair.hold(tokens)
    pair.decode.prefill(tokens[: 2 * _BLOCK_SIZE], tenant=_TENANT)
    _, usage = generate(pair.decode, tokens, source)
    assert (usage.device_tokens, usage.remote_tokens) == (2 * _BLOCK_SIZE, 3 * _BLOCK_SIZE)
    _, usage = generate(pair.decode, tokens, source)
    assert usage.remote_tokens == 0


def test_several_completions_fetch_the_prompt_once(pair: Pair) -> None:
    tokens = prompt(101)
    expected = generate(pair.prefill, tokens, n=3, seed=1, temperature=1.0)[0]
    _, source = pair.hold(tokens)
    answer, usage = generate(pair.decode, tokens, source, n=3, seed=1, temperature=1.0)
    assert sorted(answer) == sorted(expected)
    assert usage.remote_tokens == 5 * _BLOCK_SIZE


@pytest.mark.parametrize("policy", CompressionPolicy)
def test_fetched_kv_is_compressed_like_computed_kv(pair: Pair, policy: CompressionPolicy) -> None:
    tokens, compression = prompt(120 + len(policy)), Compression(policy, 40)
    expected = generate(pair.prefill, tokens, compression=compression)[0]
    _, source = pair.hold(tokens)
    answer, usage = generate(pair.decode, tokens, source, compression=compression)
    assert answer == expected
    assert usage.remote_tokens == 5 * _BLOCK_SIZE


def test_prompt_log_probabilities_are_returned_for_fetched_kv(pair: Pair) -> None:
    tokens = prompt(113)
    _, source = pair.hold(tokens)
    first = next(iter(pair.decode.generate(tokens, tenant=_TENANT, kv_source=source, prompt_logprobs=0)))
    assert len(first.prompt_logprobs) == len(tokens) - 1


def test_blocks_are_streamed_in_order_from_the_requested_position(pair: Pair) -> None:
    _, source = pair.hold(prompt(102))
    header, *blocks = pair.prefill.fetch_kv(source.lease_id, tenant=_TENANT, epoch=source.epoch)
    assert (header.format.num_blocks, header.format.block_size, header.format.epoch) == (5, _BLOCK_SIZE, source.epoch)
    assert [each.block for each in blocks] == list(range(5))
    assert {len(each.data) for each in blocks} == {
        _HEAD_BYTES + _TOKENS_BYTES + header.format.block_bytes + _CHECKSUM_BYTES
    }
    _, *last_blocks = pair.prefill.fetch_kv(source.lease_id, tenant=_TENANT, first_block=3)
    assert [each.block for each in last_blocks] == [3, 4]
    for again, before in zip(last_blocks, blocks[3:], strict=True):
        assert again.data[: _SALT_AND_MAC.start] == before.data[: _SALT_AND_MAC.start]
        assert again.data[_SALT_AND_MAC] != before.data[_SALT_AND_MAC], "each object has a salt of its own"
        assert again.data[_SALT_AND_MAC.stop : -_CHECKSUM_BYTES] == before.data[_SALT_AND_MAC.stop : -_CHECKSUM_BYTES]


def test_layers_can_be_fetched_separately(pair: Pair) -> None:
    _, source = pair.hold(prompt(114))
    header, *whole = pair.prefill.fetch_kv(source.lease_id, tenant=_TENANT)
    num_layers = header.format.num_layers
    kv = slice(_HEAD_BYTES + _TOKENS_BYTES, -_CHECKSUM_BYTES)
    layers = [
        list(pair.prefill.fetch_kv(source.lease_id, tenant=_TENANT, first_layer=layer, num_layers=1))[1:]
        for layer in range(num_layers)
    ]
    assert num_layers > 1
    for index, block in enumerate(whole):
        kv_of_layers = [blocks[index].data[kv] for blocks in layers]
        assert b"".join(kv_of_layers) == block.data[kv]
    with pytest.raises(grpc.RpcError) as caught:
        list(pair.prefill.fetch_kv(source.lease_id, tenant=_TENANT, first_layer=num_layers))
    assert (caught.value.code(), caught.value.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"first_layer: expected at most {num_layers - 1}, the last one, got {num_layers}",
    )


@pytest.mark.skipif(SERVER is None, reason=WHY_NOT)
def test_blocks_are_loaded_from_a_shared_store_and_fetched_when_it_is_down(tmp_path: Path) -> None:
    with redis_server(tmp_path) as redis:
        shared = ("--set", f"tiers.redis_url={redis.url}", *write_secret(tmp_path))
        with (
            serving(*SENDS_KV, *shared) as (_, address),
            serving(*fetching_from(address), *shared) as (_, decode_address),
            Client(address, timeout_s=PATIENCE_S) as first,
            Client(decode_address, timeout_s=PATIENCE_S) as decode,
        ):
            pair = Pair(first, decode, address, ForkedProcess)
            for seed, is_store_down in ((115, False), (116, False), (117, False), (118, True)):
                tokens = prompt(seed)
                expected, _ = generate(first, tokens, temperature=0.9, seed=1)
                num_blocks = 5 * (seed - 114)  # of all prompts so far
                wait_until(lambda: first.stats().tiers[0].saved_blocks >= num_blocks)  # noqa: B023 - called before the next iteration
                _, source = pair.hold(tokens)

                def all_blocks_are_in_redis() -> bool:
                    _, *blocks = first.fetch_kv(source.lease_id, tenant=_TENANT, stores=["redis"])  # noqa: B023
                    return [each.handle.store for each in blocks] == ["redis"] * 5

                wait_until(all_blocks_are_in_redis)
                num_loaded = decode.stats().tiers[0].loaded_blocks
                if is_store_down:
                    assert num_loaded >= 5, "one prompt was loaded; on a busy machine others may be fetched"
                    redis.stop()
                answer, usage = generate(decode, tokens, source, temperature=0.9, seed=1)
                assert answer == expected
                assert usage.remote_tokens == 5 * _BLOCK_SIZE
                if is_store_down:
                    assert decode.stats().tiers[0].loaded_blocks == num_loaded
                first.release(source.lease_id, tenant=_TENANT)


def test_an_unknown_lease_is_not_found(pair: Pair) -> None:
    tokens = prompt(103)
    _, source = pair.hold(tokens)
    wrong_epoch = KVSource(address=source.address, lease_id=source.lease_id, epoch=source.epoch + 1)
    code, details = refusal(pair.decode, tokens, wrong_epoch)
    assert (code, details) == (
        grpc.StatusCode.NOT_FOUND,
        "kv_source: epoch: this server has restarted since, so its leases are lost",
    )
    pair.prefill.release(source.lease_id, tenant=_TENANT)
    code, details = refusal(pair.decode, tokens, source)
    assert (code, details.partition(": expected")[0]) == (grpc.StatusCode.NOT_FOUND, "kv_source: lease_id")


def test_a_lease_of_another_prompt_or_tenant_is_refused(pair: Pair) -> None:
    _, source = pair.hold(prompt(104))
    code, details = refusal(pair.decode, prompt(105), source)
    assert (code, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "kv_source: the lease is of another prompt (foreign)",
    )
    with pytest.raises(grpc.RpcError) as caught:
        list(pair.decode.generate(prompt(104), tenant="other", kv_source=source))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    salted = pair.hold(prompt(106), salt="a")[1]
    code, _ = refusal(pair.decode, prompt(106), salted)
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_kv_without_the_mac_of_the_servers_secret_is_computed(pair: Pair, tmp_path: Path) -> None:
    """While an operator replaces the secret, the servers have different ones for some time."""
    tokens = prompt(113)
    _, source = pair.hold(tokens)
    expected, _ = generate(pair.prefill, tokens)
    settings = (*fetching_from(pair.address), *write_secret(tmp_path, "a newer secret of one server"))
    with serving(*settings) as (_, address), Client(address, timeout_s=PATIENCE_S) as decode:
        answer, usage = generate(decode, tokens, source)
    assert answer == expected
    assert usage.cached_tokens == 0


def test_only_configured_sources_are_contacted_and_an_unreachable_one_is_reported(pair: Pair) -> None:
    _, source = pair.hold(prompt(107))
    unconfigured = KVSource(address="127.0.0.1:2", lease_id=source.lease_id)
    assert refusal(pair.decode, prompt(107), unconfigured) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "kv_source.address: no section kv_sources of this server has this address",
    )
    unreachable = KVSource(address="127.0.0.1:1", lease_id=source.lease_id)
    code, details = refusal(pair.decode, prompt(107), unreachable)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details.startswith("kv_source: FetchKV failed on the source with UNAVAILABLE: ")
    assert refusal(pair.prefill, prompt(108), source)[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_a_purged_prompt_is_not_sent(pair: Pair) -> None:
    tokens = prompt(109)
    _, source = pair.hold(tokens)
    pair.prefill.purge(tenant=_TENANT)
    code, details = refusal(pair.decode, tokens, source)
    assert code is grpc.StatusCode.NOT_FOUND
    assert "purged" in details


def test_a_server_does_not_send_kv_by_default(pair: Pair) -> None:
    held = pair.decode.prefill(prompt(110), tenant=_TENANT, hold_lease=True)
    with pytest.raises(grpc.RpcError) as caught:
        list(pair.decode.fetch_kv(held.lease_id, tenant=_TENANT))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_another_kv_format_is_refused_by_name(pair: Pair) -> None:
    tokens = prompt(111)
    _, source = pair.hold(tokens)
    options = (*fetching_from(pair.address), "--set", "cache.block_size=32")
    with serving(*options) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        assert refusal(client, tokens, source) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "kv_source: expected K/V with the block_size 32, got 64",
        )


def test_a_killed_or_restarted_source_is_reported_and_nothing_leaks(tmp_path: Path) -> None:
    tokens = prompt(112)
    with serving(*SENDS_KV) as (process, address), Client(address, timeout_s=PATIENCE_S) as first:
        held = first.prefill(tokens, tenant=_TENANT, hold_lease=True)
        source = KVSource(address=address, lease_id=held.lease_id, epoch=held.epoch)
        with (
            serving(*fetching_from(address)) as (_, decode_address),
            Client(decode_address, timeout_s=PATIENCE_S) as decode,
        ):
            os.kill(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)
            assert refusal(decode, tokens, source)[0] is grpc.StatusCode.UNAVAILABLE
            with serving(*SENDS_KV, "--port", address.rpartition(":")[2]):
                assert refusal(decode, tokens, source)[0] in (
                    grpc.StatusCode.NOT_FOUND,
                    grpc.StatusCode.UNAVAILABLE,  # gRPC waits for some time before it connects again
                )
            answer, usage = generate(decode, tokens)
            assert usage.cached_tokens == 0
            assert len(answer) == 12
            blocks = decode.stats().blocks
            assert (blocks.leased, blocks.pinned) == (0, 0)
