"""`RadixCache` with quantized K/V, and with blocks in host memory and on a disk."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from radixkv.errors import ConfigError, InvalidRequest, StoreError
from radixkv.integrations.tiers.byte_store import ByteStore
from radixkv.integrations.transformers import RadixCache
from radixkv.integrations.transformers.kv_slots import KVSlots
from radixkv.integrations.transformers.model_requirements import cache_name
from radixkv.kernels.quantization import INT4, dequantize, quantize
from radixkv.kernels.reference import hadamard_transform
from radixkv.offload.block_keys import BlockKeys
from radixkv.offload.tiers.block_object import object_bytes
from tests.integrations.generations import (
    GREEDY,
    KINDS,
    counted,
    forward,
    model_of,
    prompt,
    same,
    wrong_answers_to_threads,
)
from tests.model.exact.checkpoints import VOCAB_SIZE

BYTES = 8 << 20
QUANTIZED = {
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "int8": (torch.int8, torch.int8),
    "k8v4": (torch.int8, INT4),
}


@pytest.fixture
def llama() -> Any:
    return model_of(KINDS["llama"])


def with_disk(model: Any, path: Path, capacity_tokens: int = 1024, **options: Any) -> RadixCache:
    tiers = {"disk_path": str(path), "disk_bytes": BYTES}
    return RadixCache(model, capacity_tokens, block_size=4, tiers=tiers, **options)


def saved(model: Any, path: Path, ids: torch.Tensor, **names: str) -> None:
    """Compute a prompt in another cache, which keeps it on the disk."""
    with with_disk(model, path) as radix:
        radix.generate(ids, **names, **GREEDY)


def rounded(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == INT4:
        return hadamard_transform(
            dequantize(*quantize(hadamard_transform(states, states.dtype), dtype), dtype), states.dtype
        )
    return dequantize(*quantize(states, dtype), dtype)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_quantized_kv_are_those_of_the_model_rounded_once(kind: str, kv_dtype: str) -> None:
    model = model_of(KINDS[kind])
    radix, plain, ids = RadixCache(model, 256, kv_dtype=kv_dtype), RadixCache(model, 256), prompt(1, 61)
    radix.generate(ids, **GREEDY)
    plain.generate(ids, **GREEDY)
    assert radix.num_bytes < plain.num_bytes / 2.5
    longer = torch.cat([ids, prompt(2, 9)], dim=1)
    found, exact = radix.cache_for(longer), plain.cache_for(longer)
    assert found.num_cached_tokens == exact.num_cached_tokens == (61,)
    for layer, plain_layer in zip(found.layers, exact.layers, strict=True):
        for got, states, dtype in zip(
            (layer.keys, layer.values), (plain_layer.keys, plain_layer.values), QUANTIZED[kv_dtype], strict=True
        ):
            assert torch.equal(got, rounded(states, dtype))
    logits = torch.stack(radix.generate(longer, **GREEDY).logits[:1])
    expected = torch.stack(model.generate(longer, **GREEDY).logits[:1])
    assert 0 < (logits - expected).abs().max() < 0.2 * expected.abs().max()


@pytest.mark.parametrize("kv_dtype", ["auto", *QUANTIZED])
def test_a_branch_of_quantized_kv_copies_the_rest_of_its_block(llama: Any, kv_dtype: str) -> None:
    radix = RadixCache(llama, 256, kv_dtype=kv_dtype)
    radix.generate(prompt(1, 24, 5), **GREEDY)
    radix.generate(prompt(1, 24, 7), **GREEDY)
    first, second = (radix.cache_for(prompt(1, 24, tail, 3)) for tail in (5, 7))
    assert (first.num_cached_tokens, second.num_cached_tokens) == ((29,), (31,))
    for one, other in zip(first.layers, second.layers, strict=True):
        assert torch.equal(one.keys[:, :, :24], other.keys[:, :, :24])
        assert not torch.equal(one.keys[:, :, 24:], other.keys[:, :, 24:29])


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_restarted_process_loads_the_whole_blocks_of_a_prompt_bit_for_bit(
    kind: str, kv_dtype: str, tmp_path: Path
) -> None:
    model, ids = model_of(KINDS[kind]), prompt(1, 62)
    with with_disk(model, tmp_path, kv_dtype=kv_dtype) as radix:
        radix.generate(ids, **GREEDY)
        before = radix.cache_for(ids[:, :61])
        assert before.num_cached_tokens == (60,)
    model = model_of(KINDS[kind])  # as another process would load it
    with with_disk(model, tmp_path, kv_dtype=kv_dtype) as radix:
        with counted(model) as sizes:
            answer = radix.generate(ids, **GREEDY)
        assert sizes == [2] + [1] * 7, "60 of 62 tokens fill whole blocks"
        assert radix.tier_counts["loaded"] == 15
        if kv_dtype == "auto":
            assert same(answer, model.generate(ids, **GREEDY))
        after = radix.cache_for(ids[:, :61])
        for one, other in zip(before.layers, after.layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


def test_generated_tokens_are_kept_as_well(llama: Any, tmp_path: Path) -> None:
    with with_disk(llama, tmp_path) as radix:
        answer = radix.generate(prompt(1, 21), **GREEDY).sequences
    with with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(torch.cat([answer, prompt(3, 5)], dim=1)).num_cached_tokens == (28,)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("tiers", [{"host_bytes": BYTES}, {"host_bytes": 1 << 16}, {"disk_bytes": BYTES}], ids=str)
def test_random_calls_with_evictions_get_the_answers_of_generate(
    kind: str, tiers: dict[str, Any], tmp_path: Path
) -> None:
    model, random = model_of(KINDS[kind]), Random(str(tiers))
    if "disk_bytes" in tiers:
        tiers = tiers | {"disk_path": str(tmp_path)}
    radix = RadixCache(model, 96, block_size=4, tiers=tiers)
    known: dict[str, list[torch.Tensor]] = {"acme": [prompt(2, 30)], "other": [prompt(2, 30)]}
    for _ in range(24):
        tenant = random.choice(list(known))
        base = random.choice(known[tenant])
        kept = base[:, : random.randint(1, base.shape[1])]
        new = torch.tensor([[random.randint(3, VOCAB_SIZE - 1) for _ in range(random.randint(1, 12))]])
        ids = torch.cat([kept, new], dim=1)
        out = radix.generate(ids, tenant=tenant, **GREEDY)
        assert same(out, model.generate(ids, **GREEDY))
        known[tenant] = [each for each in [*known[tenant][-5:], out.sequences] if each.shape[1] < 80]
        if random.random() < 0.1:
            radix.clear(tenant=tenant)
            assert radix.cache_for(ids, tenant=tenant).num_cached_tokens == (0,)
    assert radix.counts.num_evicted_blocks > 0
    assert radix.tier_counts["loaded"] > 0 or radix.tier_counts["evicted"] > 0, "the small tier evicts most of it"
    radix.close()


def test_prompts_share_nothing_over_the_disk_between_tenants_or_salts(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    saved(llama, tmp_path, ids, tenant="acme", salt="one")
    with with_disk(llama, tmp_path) as radix:
        for names in ({}, {"tenant": "acme"}, {"salt": "one"}, {"tenant": "acme", "salt": "two"}):
            assert radix.cache_for(ids, **names).num_cached_tokens == (0,)
        assert radix.cache_for(ids, tenant="acme", salt="one").num_cached_tokens == (40,)


def change_data(model: Any, radix: RadixCache) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(0.5)
    radix.clear()


def change_in_place(model: Any, radix: RadixCache) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)


@pytest.mark.parametrize("change", [change_data, change_in_place])
def test_changed_weights_load_nothing_that_others_computed(llama: Any, change: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    saved(llama, tmp_path, ids)
    with with_disk(llama, tmp_path) as radix:
        change(llama, radix)
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    with with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids).num_cached_tokens == (40,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


@pytest.mark.parametrize("other", ["weights", "embeddings", "configuration", "dtype", "format"])
def test_other_models_and_formats_load_nothing(llama: Any, other: str, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    saved(llama, tmp_path, ids)
    model, kv_dtype = llama, "auto"
    if other == "weights":
        model = model_of(KINDS["llama"], seed=1)
    elif other == "embeddings":  # of tokens that the test prompt does not have
        with torch.no_grad():
            model.model.embed_tokens.weight[64:].mul_(2)
    elif other == "configuration":
        model.config.rope_parameters["rope_theta"] *= 2
    elif other == "dtype":
        model = llama.to(torch.bfloat16)
    else:
        kv_dtype = "int8"
    with with_disk(model, tmp_path, kv_dtype=kv_dtype) as radix:
        assert radix.cache_for(ids).num_cached_tokens == (0,)


def test_clear_deletes_from_the_disk_what_an_earlier_process_saved(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    for tenant in ("acme", "other"):
        saved(llama, tmp_path, ids, tenant=tenant)
    with with_disk(llama, tmp_path) as radix:
        radix.clear(tenant="acme")
        assert radix.cache_for(ids, tenant="acme").num_cached_tokens == (0,)
        assert radix.cache_for(ids, tenant="other").num_cached_tokens == (40,)
    with with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids, tenant="acme").num_cached_tokens == (0,)
        radix.clear()
    with with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids, tenant="other").num_cached_tokens == (0,)


def test_clear_deletes_what_is_being_saved(llama: Any, tmp_path: Path) -> None:
    with with_disk(llama, tmp_path) as radix:
        for seed in range(5):
            radix.generate(prompt(seed, 41), tenant="acme", **GREEDY)
            radix.clear(tenant="acme")
    with with_disk(llama, tmp_path) as radix:
        assert [radix.cache_for(prompt(seed, 41), tenant="acme").num_cached_tokens for seed in range(5)] == [(0,)] * 5


def test_damaged_blocks_are_computed(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    saved(llama, tmp_path, ids)
    largest = max((each for each in tmp_path.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    content = bytearray(largest.read_bytes())
    for index in range(0, len(content), 1000):
        content[index] ^= 1
    largest.write_bytes(content)
    with with_disk(llama, tmp_path) as radix:
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
        assert radix.counts.num_cached_tokens < 40


def test_a_directory_that_another_process_uses_costs_only_hits(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    with with_disk(llama, tmp_path) as first, with_disk(llama, tmp_path) as second:
        first.generate(ids, **GREEDY)
        assert same(second.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


def test_several_threads_share_the_tiers() -> None:
    model = model_of(KINDS["gemma3"])
    radix = RadixCache(model, 96, block_size=4, tiers={"host_bytes": BYTES})
    assert wrong_answers_to_threads(radix, model) == []
    assert radix.tier_counts["loaded"] > 0
    radix.close()


def test_a_prefix_that_is_evicted_during_a_load_is_computed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    radix = RadixCache(llama, 64, block_size=4, tiers={"host_bytes": BYTES})
    ids = prompt(1, 41)
    radix.generate(ids, **GREEDY)
    tiers = radix._store._tiers
    assert tiers is not None
    assert tiers._store.wait_for_writes(60)
    radix._store._cache.evict(4)
    load = tiers.load

    def load_late(*arguments: Any) -> Any:
        for first, payloads in load(*arguments):
            radix._store._cache.evict(16)
            yield first, payloads

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "load", load_late)
        assert radix.cache_for(ids).num_cached_tokens == (0,)
    assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    radix.close()


def test_a_forward_pass_of_the_model_itself_is_not_disturbed(llama: Any, tmp_path: Path) -> None:
    with with_disk(llama, tmp_path) as radix, radix.cache_for(prompt(1, 30)) as cache:
        assert torch.equal(forward(llama, cache, prompt(1, 30)).logits, llama(prompt(1, 30)).logits)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_dtype": "int4"}, InvalidRequest, "kv_dtype: expected one of auto, fp8, int8, k8v4, got 'int4'"),
        ({"tiers": {}}, ConfigError, "tiers: expected host_bytes, disk_path or redis_url"),
        ({"tiers": {"disk": "/tmp"}}, ConfigError, "disk"),
        ({"tiers": {"host_bytes": 100}}, ConfigError, "host_bytes"),
        (
            {"tiers": {"redis_url": "redis://localhost", "trusted": True}},
            ConfigError,
            "redis_url: RadixCache has tiers",
        ),
        ({"tiers": {"host_bytes": BYTES, "model_id": "a"}}, ConfigError, "model_id: RadixCache identifies a model by"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(llama: Any, options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        RadixCache(llama, **options)
    assert not llama._forward_pre_hooks


def test_kv_of_weights_that_changed_meanwhile_are_not_saved(llama: Any, tmp_path: Path) -> None:
    ids, weight = prompt(1, 41), llama.model.layers[0].self_attn.k_proj.weight
    expected = llama.generate(ids, **GREEDY)
    with with_disk(llama, tmp_path) as radix:
        with radix.cache_for(ids) as begun:
            with torch.no_grad():
                weight.mul_(0.5)
            forward(llama, begun, ids)
            with torch.no_grad():
                weight.mul_(2.0)  # the same weights as before, to the bit
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), expected)
    with with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids).num_cached_tokens == (40,)
        assert same(radix.generate(ids, **GREEDY), expected)


@pytest.mark.parametrize("change", ["hook", "frequencies"])
def test_what_a_digest_of_weights_cannot_show_is_recognized_by_a_test_prompt(
    llama: Any, change: str, tmp_path: Path
) -> None:
    ids = prompt(1, 41)
    saved(llama, tmp_path, ids)
    if change == "hook":
        llama.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _, __, out: out + 1)
    else:
        llama.model.rotary_emb.inv_freq.mul_(0.5)
    with with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


def test_a_full_tier_evicts_the_end_of_a_prompt_before_its_beginning(llama: Any) -> None:
    with RadixCache(llama, 1024, block_size=4, tiers={"host_bytes": BYTES}) as radix:
        block_bytes = radix.num_bytes // 256
    radix = RadixCache(llama, 32, block_size=4, tiers={"host_bytes": 12 * object_bytes(4, block_bytes, is_sealed=True)})
    tiers = radix._store._tiers
    assert tiers is not None
    for ids in (prompt(1, 12), prompt(1, 12, 12), prompt(2, 20)):  # the second one begins like the first one
        radix.generate(ids, **GREEDY)
        assert tiers._store.wait_for_writes(60)
    radix._store._cache.purge()
    assert radix.tier_counts["evicted"] > 0
    assert radix.cache_for(prompt(2, 20)).num_cached_tokens == (19,)
    assert radix.cache_for(prompt(1, 12, 12)).num_cached_tokens[0] >= 12
    radix.close()


def test_each_block_of_a_generation_is_hashed_once_to_save_it(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    child = BlockKeys.child

    def counting(keys: BlockKeys, parent: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return child(keys, parent, tokens)

    with RadixCache(llama, 1024, block_size=4, tiers={"host_bytes": BYTES}) as radix:
        cache = radix.cache_for(prompt(1, 41))
        monkeypatch.setattr(BlockKeys, "child", counting)
        llama.generate(prompt(1, 41), **{cache_name(llama): cache}, **GREEDY | {"max_new_tokens": 60})
        assert len(hashed) == 100 // 4
        assert len(set(hashed)) == len(hashed)


def test_blocks_after_a_crop_are_saved(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 40)
    with with_disk(llama, tmp_path) as radix, radix.cache_for(ids) as cache:
        forward(llama, cache, ids)
        forward(llama, cache, prompt(2, 8))
        cache.crop(-8)
        forward(llama, cache, prompt(3, 8))
    with with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(torch.cat([ids, prompt(3, 8), prompt(4, 1)], dim=1)).num_cached_tokens == (48,)


def test_a_prompt_of_whole_blocks_that_is_cached_reads_nothing(llama: Any) -> None:
    radix = RadixCache(llama, 64, block_size=4, tiers={"host_bytes": BYTES})
    radix.generate(prompt(1, 40), **GREEDY)
    tiers = radix._store._tiers
    assert tiers is not None
    assert tiers._store.wait_for_writes(60)
    assert radix.cache_for(prompt(1, 40)).num_cached_tokens == (39,)
    assert radix.tier_counts["loaded"] == 0
    radix.close()


def test_tiers_are_opened_in_eval_mode(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    saved(llama, tmp_path, ids)
    with with_disk(llama.train(), tmp_path) as radix:  # dropout would change the K/V of the test prompt
        llama.eval()
        assert radix.cache_for(ids).num_cached_tokens == (40,)
        llama.train()
        llama.model.layers[0].self_attn.k_proj.weight.data.mul_(0.5)
        radix.clear()
        llama.eval()
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


def test_a_closed_cache_opens_nothing_again(llama: Any, tmp_path: Path) -> None:
    radix = with_disk(llama, tmp_path)
    radix.close()
    radix.clear()
    radix.clear(tenant="acme")
    saved(llama, tmp_path, prompt(1, 41))
    with with_disk(llama, tmp_path) as other:
        assert other.cache_for(prompt(1, 41)).num_cached_tokens == (40,), "the directory was not locked"


def test_tiers_that_could_not_be_cleared_stay_closed(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def purge(*_: object) -> None:
        raise StoreError("tier disk: values were not deleted")

    ids = prompt(1, 41)
    radix = with_disk(llama, tmp_path)
    radix.generate(ids, **GREEDY)
    monkeypatch.setattr(ByteStore, "purge", purge)
    with pytest.raises(StoreError):
        radix.clear()
    assert radix.cache_for(ids).num_cached_tokens == (0,)
    assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    radix.close()


def test_without_memory_for_a_copy_the_generation_goes_on(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_blocks(*_: object) -> None:
        raise MemoryError

    radix, ids = RadixCache(llama, 256, block_size=4, tiers={"host_bytes": BYTES}), prompt(1, 41)
    monkeypatch.setattr(KVSlots, "read_blocks", read_blocks)
    assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    assert radix.cache_for(ids).num_cached_tokens == (40,)
    radix.close()


def test_blocks_that_could_not_be_copied_are_saved_later(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def num_saved_blocks() -> int:
        with RadixCache(llama, 256, block_size=4, tiers={"host_bytes": BYTES}) as radix:
            radix.generate(prompt(1, 40), **GREEDY)
            return int(radix.tier_counts["saved"])

    read_blocks, num_copied = KVSlots.read_blocks, []

    def fail_once(slots: KVSlots, indexes: Any) -> Any:
        num_copied.append(len(indexes))
        if len(num_copied) == 1:
            raise MemoryError
        return read_blocks(slots, indexes)

    expected = num_saved_blocks()
    monkeypatch.setattr(KVSlots, "read_blocks", fail_once)
    assert num_saved_blocks() == expected > num_copied[0] == 10, "the blocks of the prompt are saved with the answer's"


def test_a_forward_pass_with_autocast_is_refused(llama: Any) -> None:
    radix = RadixCache(llama, 256)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InvalidRequest, match=r"expected a forward pass without torch\.autocast"),
    ):
        radix.generate(prompt(1, 30), **GREEDY)
