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
    forward,
    generate_in_threads,
    model_of,
    prompt,
    record_forward_sizes,
    same,
)
from tests.model.exact.checkpoints import VOCAB_SIZE
from tests.patience import wait_until

TIER_BYTES = 8 << 20  # more than any test stores
# The dtypes of keys and of values, for each quantized `kv_dtype`.
QUANTIZED = {
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "int8": (torch.int8, torch.int8),
    "k8v4": (torch.int8, INT4),
}


@pytest.fixture
def llama() -> Any:
    return model_of(KINDS["llama"])


def open_with_disk(model: Any, path: Path, capacity_tokens: int = 1024, **options: Any) -> RadixCache:
    tiers = {"disk_path": str(path), "disk_bytes": TIER_BYTES}
    return RadixCache(model, capacity_tokens, block_size=4, tiers=tiers, **options)


def save_to_disk(model: Any, path: Path, ids: torch.Tensor, **owner: str) -> None:
    """Compute a prompt with a `RadixCache` of its own, which leaves the K/V on the disk."""
    with open_with_disk(model, path) as radix:
        radix.generate(ids, **owner, **GREEDY)


def rounded(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return keys or values after quantization; those of 4 bits are rotated before it, and rotated back after it."""
    if dtype == INT4:
        rotated = hadamard_transform(states, states.dtype)
        return hadamard_transform(dequantize(*quantize(rotated, dtype), dtype), states.dtype)
    return dequantize(*quantize(states, dtype), dtype)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_quantized_kv_are_those_of_the_model_rounded_once(kind: str, kv_dtype: str) -> None:
    model = model_of(KINDS[kind])
    radix, unquantized, ids = RadixCache(model, 256, kv_dtype=kv_dtype), RadixCache(model, 256), prompt(1, 61)
    radix.generate(ids, **GREEDY)
    unquantized.generate(ids, **GREEDY)
    assert radix.num_bytes < unquantized.num_bytes / 2.5
    longer = torch.cat([ids, prompt(2, 9)], dim=1)
    cache, exact_cache = radix.cache_for(longer), unquantized.cache_for(longer)
    assert cache.num_cached_tokens == exact_cache.num_cached_tokens == (61,)
    key_dtype, value_dtype = QUANTIZED[kv_dtype]
    for layer, exact_layer in zip(cache.layers, exact_cache.layers, strict=True):
        assert torch.equal(layer.keys, rounded(exact_layer.keys, key_dtype))
        assert torch.equal(layer.values, rounded(exact_layer.values, value_dtype))
    logits = torch.stack(radix.generate(longer, **GREEDY).logits[:1])
    expected = torch.stack(model.generate(longer, **GREEDY).logits[:1])
    assert 0 < (logits - expected).abs().max() < 0.2 * expected.abs().max()


@pytest.mark.parametrize("kv_dtype", ["auto", *QUANTIZED])
def test_a_branch_inside_a_block_copies_the_shared_tokens_of_the_block(llama: Any, kv_dtype: str) -> None:
    radix = RadixCache(llama, 256, kv_dtype=kv_dtype)
    radix.generate(prompt(1, 24, 5), **GREEDY)
    radix.generate(prompt(1, 24, 7), **GREEDY)
    first, second = (radix.cache_for(prompt(1, 24, tail, 3)) for tail in (5, 7))
    assert (first.num_cached_tokens, second.num_cached_tokens) == ((29,), (31,))
    for first_layer, second_layer in zip(first.layers, second.layers, strict=True):
        assert torch.equal(first_layer.keys[:, :, :24], second_layer.keys[:, :, :24])
        assert not torch.equal(first_layer.keys[:, :, 24:], second_layer.keys[:, :, 24:29])


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_restarted_process_loads_the_whole_blocks_of_a_prompt_bit_for_bit(
    kind: str, kv_dtype: str, tmp_path: Path
) -> None:
    model, ids = model_of(KINDS[kind]), prompt(1, 62)
    with open_with_disk(model, tmp_path, kv_dtype=kv_dtype) as radix:
        radix.generate(ids, **GREEDY)
        before = radix.cache_for(ids[:, :61])
        assert before.num_cached_tokens == (60,)
    model = model_of(KINDS[kind])  # as another process would load it
    with open_with_disk(model, tmp_path, kv_dtype=kv_dtype) as radix:
        with record_forward_sizes(model) as sizes:
            answer = radix.generate(ids, **GREEDY)
        assert sizes == [2] + [1] * 7, "60 of 62 tokens fill whole blocks"
        assert radix.tier_counts["loaded"] == 15
        if kv_dtype == "auto":
            assert same(answer, model.generate(ids, **GREEDY))
        after = radix.cache_for(ids[:, :61])
        for layer_before, layer_after in zip(before.layers, after.layers, strict=True):
            assert torch.equal(layer_before.keys, layer_after.keys)
            assert torch.equal(layer_before.values, layer_after.values)


def test_generated_tokens_are_saved_as_well(llama: Any, tmp_path: Path) -> None:
    with open_with_disk(llama, tmp_path) as radix:
        answer = radix.generate(prompt(1, 21), **GREEDY).sequences
    with open_with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(torch.cat([answer, prompt(3, 5)], dim=1)).num_cached_tokens == (28,)


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize(
    "tiers", [{"host_bytes": TIER_BYTES}, {"host_bytes": 1 << 16}, {"disk_bytes": TIER_BYTES}], ids=str
)
def test_random_calls_with_evictions_get_the_answers_of_generate(
    kind: str, tiers: dict[str, Any], tmp_path: Path
) -> None:
    model, random = model_of(KINDS[kind]), Random(str(tiers))
    if "disk_bytes" in tiers:
        tiers = tiers | {"disk_path": str(tmp_path)}
    radix = RadixCache(model, 96, block_size=4, tiers=tiers)
    # Prompts of a tenant continue the beginning of one of these sequences.
    sequences: dict[str, list[torch.Tensor]] = {"acme": [prompt(2, 30)], "other": [prompt(2, 30)]}
    for _ in range(24):
        tenant = random.choice(list(sequences))
        sequence = random.choice(sequences[tenant])
        prefix = sequence[:, : random.randint(1, sequence.shape[1])]
        suffix = torch.tensor([[random.randint(3, VOCAB_SIZE - 1) for _ in range(random.randint(1, 12))]])
        ids = torch.cat([prefix, suffix], dim=1)
        out = radix.generate(ids, tenant=tenant, **GREEDY)
        assert same(out, model.generate(ids, **GREEDY))
        recent = [*sequences[tenant][-5:], out.sequences]
        sequences[tenant] = [each for each in recent if each.shape[1] < 80]
        if random.random() < 0.1:
            radix.clear(tenant=tenant)
            assert radix.cache_for(ids, tenant=tenant).num_cached_tokens == (0,)
    assert radix.counts.num_evicted_blocks > 0
    assert radix.tier_counts["loaded"] > 0 or radix.tier_counts["evicted"] > 0, (
        "the small tier may evict blocks before they are loaded"
    )
    radix.close()


def test_prompts_share_nothing_over_the_disk_between_tenants_or_salts(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    save_to_disk(llama, tmp_path, ids, tenant="acme", salt="one")
    with open_with_disk(llama, tmp_path) as radix:
        for owner in ({}, {"tenant": "acme"}, {"salt": "one"}, {"tenant": "acme", "salt": "two"}):
            assert radix.cache_for(ids, **owner).num_cached_tokens == (0,)
        assert radix.cache_for(ids, tenant="acme", salt="one").num_cached_tokens == (40,)


def change_data_and_clear(model: Any, radix: RadixCache) -> None:
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(0.5)
    radix.clear()


def change_in_place(model: Any, radix: RadixCache) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)


@pytest.mark.parametrize("change", [change_data_and_clear, change_in_place])
def test_changed_weights_load_no_kv_of_the_earlier_weights(llama: Any, change: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    save_to_disk(llama, tmp_path, ids)
    with open_with_disk(llama, tmp_path) as radix:
        change(llama, radix)
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    with open_with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids).num_cached_tokens == (40,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


@pytest.mark.parametrize("other", ["weights", "embeddings", "configuration", "dtype", "format"])
def test_other_models_and_formats_load_nothing(llama: Any, other: str, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    save_to_disk(llama, tmp_path, ids)
    model, kv_dtype = llama, "auto"
    if other == "weights":
        model = model_of(KINDS["llama"], seed=1)
    elif other == "embeddings":  # of tokens that are not in the test prompt by which a model is recognized
        with torch.no_grad():
            model.model.embed_tokens.weight[64:].mul_(2)
    elif other == "configuration":
        model.config.rope_parameters["rope_theta"] *= 2
    elif other == "dtype":
        model = llama.to(torch.bfloat16)
    else:
        kv_dtype = "int8"
    with open_with_disk(model, tmp_path, kv_dtype=kv_dtype) as radix:
        assert radix.cache_for(ids).num_cached_tokens == (0,)


def test_clear_deletes_from_the_disk_what_an_earlier_process_saved(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    for tenant in ("acme", "other"):
        save_to_disk(llama, tmp_path, ids, tenant=tenant)
    with open_with_disk(llama, tmp_path) as radix:
        radix.clear(tenant="acme")
        assert radix.cache_for(ids, tenant="acme").num_cached_tokens == (0,)
        assert radix.cache_for(ids, tenant="other").num_cached_tokens == (40,)
    with open_with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids, tenant="acme").num_cached_tokens == (0,)
        radix.clear()
    with open_with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids, tenant="other").num_cached_tokens == (0,)


def test_clear_deletes_blocks_that_are_being_saved(llama: Any, tmp_path: Path) -> None:
    with open_with_disk(llama, tmp_path) as radix:
        for seed in range(5):
            radix.generate(prompt(seed, 41), tenant="acme", **GREEDY)
            radix.clear(tenant="acme")
    with open_with_disk(llama, tmp_path) as radix:
        assert [radix.cache_for(prompt(seed, 41), tenant="acme").num_cached_tokens for seed in range(5)] == [(0,)] * 5


def test_damaged_blocks_are_computed_again(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    save_to_disk(llama, tmp_path, ids)
    blocks = next(tmp_path.rglob("blocks"))
    content = bytearray(blocks.read_bytes())
    for index in range(0, len(content), 1000):
        content[index] ^= 1
    blocks.write_bytes(content)
    with open_with_disk(llama, tmp_path) as radix:
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
        assert radix.counts.num_cached_tokens < 40


def test_a_directory_that_another_process_uses_costs_only_hits(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    with open_with_disk(llama, tmp_path) as first, open_with_disk(llama, tmp_path) as second:
        first.generate(ids, **GREEDY)
        assert same(second.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


def test_several_threads_share_the_tiers() -> None:
    model = model_of(KINDS["gemma3"])
    radix = RadixCache(model, 96, block_size=4, tiers={"host_bytes": TIER_BYTES})
    assert generate_in_threads(radix, model) == []
    assert radix.tier_counts["loaded"] > 0
    radix.close()


def test_a_prefix_that_is_evicted_during_a_load_is_computed(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    radix = RadixCache(llama, 64, block_size=4, tiers={"host_bytes": TIER_BYTES})
    ids = prompt(1, 41)
    radix.generate(ids, **GREEDY)
    tiers = radix._store._tiers
    assert tiers is not None
    assert tiers._store.wait_for_writes(60)
    radix._store._cache.evict(4)  # the last blocks of the prompt are only in the tier
    load = tiers.load

    def load_and_evict_prefix(*arguments: Any) -> Any:
        for first, payloads in load(*arguments):
            radix._store._cache.evict(16)
            yield first, payloads

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "load", load_and_evict_prefix)
        assert radix.cache_for(ids).num_cached_tokens == (0,)
    assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    radix.close()


def test_a_forward_pass_of_the_model_itself_is_not_disturbed(llama: Any, tmp_path: Path) -> None:
    with open_with_disk(llama, tmp_path) as radix, radix.cache_for(prompt(1, 30)) as cache:
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
        (
            {"tiers": {"host_bytes": TIER_BYTES, "model_id": "a"}},
            ConfigError,
            "model_id: RadixCache identifies a model by",
        ),
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
    with open_with_disk(llama, tmp_path) as radix:
        with radix.cache_for(ids) as cache:
            with torch.no_grad():
                weight.mul_(0.5)
            forward(llama, cache, ids)
            with torch.no_grad():
                weight.mul_(2.0)  # the same weights as before, to the bit
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), expected)
    with open_with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids).num_cached_tokens == (40,)
        assert same(radix.generate(ids, **GREEDY), expected)


@pytest.mark.parametrize("change", ["hook", "frequencies"])
def test_a_test_prompt_detects_changes_that_a_digest_of_weights_cannot_show(
    llama: Any, change: str, tmp_path: Path
) -> None:
    ids = prompt(1, 41)
    save_to_disk(llama, tmp_path, ids)
    if change == "hook":
        llama.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _, __, out: out + 1)
    else:
        llama.model.rotary_emb.inv_freq.mul_(0.5)
    with open_with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


def test_a_full_tier_evicts_the_end_of_a_prompt_before_its_beginning(llama: Any) -> None:
    with RadixCache(llama, 1024, block_size=4, tiers={"host_bytes": TIER_BYTES}) as radix:
        block_bytes = radix.num_bytes // (1024 // 4)
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
    hash_child = BlockKeys.child

    def recorded_child(keys: BlockKeys, parent: bytes, tokens: bytes) -> bytes:
        hashed.append(tokens)
        return hash_child(keys, parent, tokens)

    with RadixCache(llama, 1024, block_size=4, tiers={"host_bytes": TIER_BYTES}) as radix:
        cache = radix.cache_for(prompt(1, 41))
        monkeypatch.setattr(BlockKeys, "child", recorded_child)
        llama.generate(prompt(1, 41), **{cache_name(llama): cache}, **GREEDY | {"max_new_tokens": 60})
        assert len(hashed) == (41 + 59) // 4  # the last of the 60 new tokens has no K/V
        assert len(set(hashed)) == len(hashed)


def test_blocks_after_a_crop_are_saved(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 40)
    with open_with_disk(llama, tmp_path) as radix, radix.cache_for(ids) as cache:
        forward(llama, cache, ids)
        forward(llama, cache, prompt(2, 8))
        cache.crop(-8)
        forward(llama, cache, prompt(3, 8))
    with open_with_disk(llama, tmp_path) as radix:
        assert radix.cache_for(torch.cat([ids, prompt(3, 8), prompt(4, 1)], dim=1)).num_cached_tokens == (48,)


def test_a_cached_prompt_of_whole_blocks_loads_nothing(llama: Any) -> None:
    radix = RadixCache(llama, 64, block_size=4, tiers={"host_bytes": TIER_BYTES})
    radix.generate(prompt(1, 40), **GREEDY)
    tiers = radix._store._tiers
    assert tiers is not None
    assert tiers._store.wait_for_writes(60)
    assert radix.cache_for(prompt(1, 40)).num_cached_tokens == (39,)
    assert radix.tier_counts["loaded"] == 0
    radix.close()


def test_a_model_in_training_mode_is_recognized_as_the_same_model(llama: Any, tmp_path: Path) -> None:
    ids = prompt(1, 41)
    save_to_disk(llama, tmp_path, ids)
    with open_with_disk(llama.train(), tmp_path) as radix:  # the test prompt is computed without dropout
        llama.eval()
        assert radix.cache_for(ids).num_cached_tokens == (40,)
        llama.train()
        llama.model.layers[0].self_attn.k_proj.weight.data.mul_(0.5)
        radix.clear()
        llama.eval()
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


def test_clear_of_a_closed_cache_does_not_open_the_tiers(llama: Any, tmp_path: Path) -> None:
    radix = open_with_disk(llama, tmp_path)
    radix.close()
    radix.clear()
    radix.clear(tenant="acme")
    save_to_disk(llama, tmp_path, prompt(1, 41))
    with open_with_disk(llama, tmp_path) as other:
        assert other.cache_for(prompt(1, 41)).num_cached_tokens == (40,), "the directory was not locked"


def test_tiers_that_could_not_be_cleared_stay_closed(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StoreError("tier disk: values were not deleted")

    ids = prompt(1, 41)
    radix = open_with_disk(llama, tmp_path)
    radix.generate(ids, **GREEDY)
    monkeypatch.setattr(ByteStore, "purge", fail)
    with pytest.raises(StoreError):
        radix.clear()
    assert radix.cache_for(ids).num_cached_tokens == (0,)
    assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    radix.close()


def test_without_memory_for_a_copy_the_generation_continues(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_memory(*_: object) -> None:
        raise MemoryError

    radix, ids = RadixCache(llama, 256, block_size=4, tiers={"host_bytes": TIER_BYTES}), prompt(1, 41)
    monkeypatch.setattr(KVSlots, "read_blocks", run_out_of_memory)
    assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    assert radix.cache_for(ids).num_cached_tokens == (40,)
    radix.close()


def test_blocks_that_could_not_be_copied_are_saved_later(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read_blocks = KVSlots.read_blocks
    copy_sizes: list[int] = []  # in blocks

    def fail_once(slots: KVSlots, indexes: Any) -> Any:
        copy_sizes.append(len(indexes))
        if len(copy_sizes) == 1:
            raise MemoryError
        return read_blocks(slots, indexes)

    monkeypatch.setattr(KVSlots, "read_blocks", fail_once)
    num_tokens = 40 + GREEDY["max_new_tokens"] - 1  # the last token has no K/V
    with RadixCache(llama, 256, block_size=4, tiers={"host_bytes": TIER_BYTES}) as radix:
        radix.generate(prompt(1, 40), **GREEDY)
        # The blocks of the prompt are saved with those of the answer, asynchronously.
        wait_until(lambda: radix.tier_counts["saved"] == num_tokens // 4)
    assert copy_sizes[0] == 40 // 4, "the copy of the prompt failed"


def test_a_forward_pass_with_autocast_is_refused(llama: Any) -> None:
    radix = RadixCache(llama, 256)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InvalidRequest, match=r"expected a forward pass without torch\.autocast"),
    ):
        radix.generate(prompt(1, 30), **GREEDY)
