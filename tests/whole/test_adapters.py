"""LoRA adapters written by PEFT, over gRPC: loaded at startup and while serving, mixed, reloaded and unloaded."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from radixkv.service.client import Client, Compression, CompressionPolicy, logits_of
from radixkv.v1.prefill_pb2 import MissReason, PrefillResponse
from tests.cache.walk.reusable_tokens import count_reusable_tokens
from tests.model.adapters.made_by_peft import load_adapted, write_adapter
from tests.model.exact.checkpoints import CONFIGS, SHAPE, VOCAB_SIZE, load_eager, write_checkpoint
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving

Oracles = dict[str, PreTrainedModel]  # models with an adapter, by its directory; "" is the model without one


class Files(NamedTuple):
    """A checkpoint, and the directory that contains the directories of its adapters."""

    checkpoint: Path
    adapter_root: Path

    @property
    def arguments(self) -> list[str]:
        """The arguments of `radixkv serve` for this model, with the adapter `law` loaded at startup."""
        settings = {
            "cache.capacity_tokens": 8192,
            "cache.block_size": 16,
            "model.max_adapters": 4,
            "model.adapter_directory": self.adapter_root,
            "adapters.law.path": self.adapter_root / "law-1",
        }
        options = [("--set", f"{key}={value}") for key, value in settings.items()]
        return ["--model", str(self.checkpoint), "--device", "cpu", *itertools.chain(*options)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("adapters")
    files = Files(write_checkpoint(CONFIGS["llama"], folder / "base"), folder / "served")
    write_adapter(files.checkpoint, files.adapter_root / "law-1", 1)
    write_adapter(files.checkpoint, files.adapter_root / "law-2", 2)
    write_adapter(
        files.checkpoint, files.adapter_root / "tax", 3, r=2, target_modules=["q_proj", "v_proj"], use_rslora=True
    )
    shutil.copytree(files.adapter_root / "law-1", files.adapter_root / "law-1-copy")
    shutil.copytree(files.adapter_root / "tax", folder / "outside")
    wider = write_checkpoint(LlamaConfig(**{**SHAPE, "hidden_size": 32}), folder / "wider")
    write_adapter(wider, files.adapter_root / "of-a-wider-model", 4)
    (files.adapter_root / "empty").mkdir()
    (files.adapter_root / "link-to-outside").symlink_to(folder / "outside")
    return files


@pytest.fixture(scope="module")
def oracles(files: Files) -> Oracles:
    adapted = {name: load_adapted(files.checkpoint, files.adapter_root / name) for name in ("law-1", "law-2", "tax")}
    return {"": load_eager(files.checkpoint), **adapted}


@pytest.fixture(scope="module")
def address(files: Files) -> Iterator[str]:
    with serving(*files.arguments) as (_, address):
        with Client(address, timeout_s=PATIENCE_S) as client:
            client.load_adapter("tax", "tax")
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> str:
    """A separate tenant for each test, so that its cache is empty."""
    return str(request.node.name)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()


def expected_logits(oracle: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    with torch.inference_mode():
        return oracle(input_ids=torch.tensor([ids])).logits[0, -1].float().numpy()


def assert_agrees(client: Client, oracle: PreTrainedModel, ids: Sequence[int], **names: str) -> None:
    np.testing.assert_allclose(
        logits_of(client.prefill(ids, return_logits=True, **names)), expected_logits(oracle, ids), atol=1e-4
    )


def test_mixed_traffic_agrees_with_peft_and_reuses_only_its_own_namespace(
    client: Client, tenant: str, oracles: Oracles
) -> None:
    shared = prompt_of(70, seed=0)
    prompts = [[*shared[: 17 * (i % 4) + 2], *prompt_of(3 + 5 * i, seed=i)] for i in range(1, 13)]
    directory_of = {"": "", "law": "law-1", "tax": "tax"}
    for name in directory_of:
        usages = [client.prefill(ids, tenant=tenant, adapter=name).usage for ids in prompts]
        assert [usage.cached_tokens for usage in usages] == count_reusable_tokens(prompts)

    def prefill(name: str, ids: list[int]) -> PrefillResponse:
        return client.prefill(ids, tenant=tenant, adapter=name, return_logits=True)

    names, all_ids = zip(*((name, ids) for ids in prompts for name in directory_of), strict=True)
    with ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(prefill, names, all_ids))
    for name, ids, response in zip(names, all_ids, responses, strict=True):
        assert response.usage.cached_tokens == len(ids) - 1
        np.testing.assert_allclose(logits_of(response), expected_logits(oracles[directory_of[name]], ids), atol=1e-4)


def test_a_cache_hit_with_an_adapter_changes_no_bit(client: Client, tenant: str) -> None:
    ids = prompt_of(100, seed=20)
    cold = client.prefill(ids, tenant=tenant, adapter="law", return_logits=True)
    warm = client.prefill(ids, tenant=tenant, adapter="law", return_logits=True)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 99)
    assert cold.logits == warm.logits


def generate(client: Client, ids: list[int], **options: object) -> list[int]:
    """Return the twelve tokens that the server generates."""
    chunks = client.generate(ids, max_new_tokens=12, ignore_eos=True, **options)
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


@pytest.mark.parametrize("policy", CompressionPolicy)
def test_a_compressed_generation_uses_its_adapter(client: Client, tenant: str, policy: CompressionPolicy) -> None:
    ids = prompt_of(60, seed=21)
    keeps_all = Compression(policy, max_tokens=100)  # more than the 60 tokens of the prompt and 12 generated ones
    uncompressed = generate(client, ids, tenant=tenant, adapter="law")
    assert generate(client, ids, tenant=tenant, adapter="law", compression=keeps_all) == uncompressed
    assert generate(client, ids, tenant=tenant, compression=keeps_all) != uncompressed, "without the adapter"
    probe = client.probe([*ids, *uncompressed], tenant=tenant, adapter="law")
    assert probe.cached_tokens >= 60
    assert client.stats().blocks.leased == 0


def test_two_names_of_the_same_weights_share_the_cache(client: Client, tenant: str) -> None:
    ids = prompt_of(40, seed=21)
    client.load_adapter("copy", "law-1-copy")
    client.prefill(ids, tenant=tenant, adapter="law")
    assert client.prefill(ids, tenant=tenant, adapter="copy").usage.cached_tokens == 39
    digests = {each.name: each.digest for each in client.adapters().adapters}
    assert digests["copy"] == digests["law"] != digests["tax"]
    segments = client.segments(tenant=tenant).segments
    assert {tuple(each.adapter_names) for each in segments} == {("law", "copy")}
    client.unload_adapter("copy")


def test_a_reloaded_adapter_reuses_nothing_and_reports_the_miss_reason(
    client: Client, tenant: str, oracles: Oracles
) -> None:
    ids = prompt_of(60, seed=22)
    client.load_adapter("changing", "law-2")
    assert_agrees(client, oracles["law-2"], ids, tenant=tenant, adapter="changing")
    client.load_adapter("changing", "law-1")
    first = client.prefill(ids, tenant=tenant, adapter="changing", return_logits=True)
    assert (first.usage.cached_tokens, first.miss_reason) == (0, MissReason.ADAPTER_CHANGED)
    np.testing.assert_allclose(logits_of(first), expected_logits(oracles["law-1"], ids), atol=1e-4)
    assert client.prefill(ids, tenant=tenant, adapter="changing").usage.cached_tokens == 59
    client.unload_adapter("changing")


def test_a_running_generation_keeps_its_weights_when_the_adapter_is_reloaded(
    client: Client, tenant: str, oracles: Oracles
) -> None:
    ids = prompt_of(20, seed=23)
    client.load_adapter("changing", "law-2")
    stream = client.generate(
        ids, tenant=tenant, adapter="changing", max_new_tokens=60, temperature=0.0, ignore_eos=True
    )
    generated = list(next(stream).token_ids)
    client.load_adapter("changing", "tax")
    prefilled_after_reload = client.prefill(ids, tenant=tenant, adapter="changing", return_logits=True)
    for chunk in stream:
        generated += chunk.token_ids
    sequence = [*ids, *generated]
    with torch.inference_mode():
        logits = oracles["law-2"](input_ids=torch.tensor([sequence])).logits[0, len(ids) - 1 : -1].float()
    assert len(generated) == 60
    # Each generated token has the highest logit of the old adapter, or one within the tolerance of it.
    chosen_logits = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    torch.testing.assert_close(chosen_logits, logits.max(dim=1).values, atol=1e-3, rtol=0)
    np.testing.assert_allclose(logits_of(prefilled_after_reload), expected_logits(oracles["tax"], ids), atol=1e-4)
    wait_until(lambda: not any(each.is_draining for each in client.adapters().adapters))
    client.unload_adapter("changing")


def test_an_unloaded_adapter_is_not_found_and_its_cache_is_freed(client: Client, tenant: str) -> None:
    client.load_adapter("unloaded", "law-2")
    client.prefill(prompt_of(64, seed=24), tenant=tenant, adapter="unloaded")
    client.unload_adapter("unloaded")
    with pytest.raises(grpc.RpcError) as refused:
        client.prefill([1, 2], tenant=tenant, adapter="unloaded")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    wait_until(lambda: client.stats(tenant=tenant).tenants[0].cached_blocks == 0)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("empty", "adapter_config.json: expected a file"),
        ("of-a-wider-model", "adapter_model.safetensors model.layers.0"),
        ("../outside", "path: expected a directory below the service's model.adapter_directory"),
        ("link-to-outside", "path: expected a directory below the service's model.adapter_directory"),
        ("missing", "got a path that is not a directory"),
    ],
)
def test_an_invalid_adapter_is_refused(client: Client, path: str, message: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        client.load_adapter("wrong", path)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in refused.value.details()
    assert "wrong" not in {each.name for each in client.adapters().adapters}


def test_two_names_of_the_same_weights_are_one_adapter(client: Client) -> None:
    for number in range(2):
        client.load_adapter(f"same-{number}", "law-2")
    assert len({each.digest for each in client.adapters().adapters}) == 3, "law, tax, and one for both new names"
    for number in range(2):
        client.unload_adapter(f"same-{number}")


def test_adapters_beyond_the_maximum_are_refused(client: Client, files: Files) -> None:
    for number in range(3):
        write_adapter(files.checkpoint, files.adapter_root / f"more-{number}", 10 + number)
    for number in range(2):  # with law and tax, these are the four of `model.max_adapters`
        client.load_adapter(f"more-{number}", f"more-{number}")
    with pytest.raises(grpc.RpcError) as refused:
        client.load_adapter("more-2", "more-2")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for number in range(2):
        client.unload_adapter(f"more-{number}")


def test_a_restarted_server_loads_the_adapters_in_its_configuration(
    client: Client, tenant: str, files: Files, oracles: Oracles
) -> None:
    ids = prompt_of(33, seed=25)
    assert_agrees(client, oracles["law-1"], ids, tenant=tenant, adapter="law")
    (before,) = (each for each in client.adapters().adapters if each.name == "law")
    with serving(*files.arguments) as (_, address), Client(address, timeout_s=PATIENCE_S) as restarted_client:
        (after,) = restarted_client.adapters().adapters
        assert (after.name, after.digest) == (before.name, before.digest)
        assert restarted_client.prefill(ids, tenant=tenant, adapter="law").miss_reason == MissReason.COLD
        assert_agrees(restarted_client, oracles["law-1"], ids, tenant=tenant, adapter="law")


def test_an_activated_adapter_applies_from_its_invocation_on(
    client: Client, tenant: str, files: Files, oracles: Oracles
) -> None:
    directory = write_adapter(files.checkpoint, files.adapter_root / "invoked", 5, alora_invocation_tokens=[7, 8])
    oracle = load_adapted(files.checkpoint, directory)
    client.load_adapter("invoked", "invoked")

    head = [each for each in prompt_of(50, seed=26) if each not in (7, 8)]
    client.prefill(head, tenant=tenant)
    assert client.prefill(head, tenant=tenant, adapter="invoked").usage.cached_tokens == len(head) - 1
    assert_agrees(client, oracles[""], head, tenant=tenant, adapter="invoked")

    once, twice = [*head, 7, 8, *head[:9]], [*head, 7, 8, *head[:9], 7, 8, *head[:5]]
    assert client.prefill(once, tenant=tenant, adapter="invoked").usage.cached_tokens == len(head)
    for ids in (once, twice, once, twice):
        assert_agrees(client, oracle, ids, tenant=tenant, adapter="invoked")
    assert client.prefill([*twice, 1], tenant=tenant, adapter="invoked").usage.cached_tokens == len(twice)

    for policy in CompressionPolicy:
        keeps_all, evicts_most = Compression(policy, max_tokens=500), Compression(policy, max_tokens=20)
        uncompressed, kept_whole, cold, warm = (
            generate(client, twice, tenant=tenant, adapter="invoked", **options)
            for options in (
                {},
                {"compression": keeps_all},
                {"compression": evicts_most, "read_cache": False, "write_cache": False},
                {"compression": evicts_most},
            )
        )
        assert kept_whole == uncompressed
        assert cold == warm != uncompressed
    client.unload_adapter("invoked")
