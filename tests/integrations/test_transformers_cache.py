"""`RadixCache` compared with transformers' own `generate`, on small checkpoints with random weights."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    MambaConfig,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from radixkv.errors import InvalidRequest, LifecycleError, PromptTooLong, UnsupportedModel
from radixkv.integrations.transformers import RadixCache, prompt_cache
from radixkv.integrations.transformers.kv_slots import KVSlots
from radixkv.integrations.transformers.model_requirements import CACHE_NAMES, cache_name
from tests.integrations.generations import (
    GREEDY,
    KINDS,
    MAX_DIFFERENCE,
    close,
    forward,
    generate_in_threads,
    model_of,
    padded,
    prompt,
    record_forward_sizes,
    same,
)
from tests.model.coverage.small_configs import covered_types, small_config
from tests.model.exact.checkpoints import SHAPE, VOCAB_SIZE

# Larger differences of models that run their layers several times per forward pass, which amplifies rounding. In
# float64 the logits agree.
MAX_DIFFERENCES = {"hrm_text": 1e-4}


@pytest.fixture
def llama() -> Any:
    return model_of(KINDS["llama"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_only_the_suffix_is_computed_and_the_answer_is_that_of_generate(kind: str, attention: str) -> None:
    model = model_of(KINDS[kind])
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip("transformers has no such attention for this model")
    model.set_attn_implementation(attention)
    radix = RadixCache(model, 1024)
    for tail, num_cached in ((9, 0), (1, 61), (40, 61), (41, 61)):
        ids = prompt(1, 61, tail)
        expected = model.generate(ids, **GREEDY)
        with record_forward_sizes(model) as sizes:
            assert same(radix.generate(ids, **GREEDY), expected)
        assert sizes == [ids.shape[1] - num_cached] + [1] * 7  # the prefill gives the first of eight new tokens


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_hit_every_bit_is_that_of_a_cache_of_transformers_with_the_same_tokens(kind: str) -> None:
    model = model_of(KINDS[kind])
    radix, ids = RadixCache(model, 1024), prompt(1, 61, 12)
    dynamic_cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :61], **{cache_name(model): dynamic_cache})
        with radix.cache_for(ids[:, :61]) as cache:
            model(ids[:, :61], **{cache_name(model): cache})
    expected = model.generate(ids, **{cache_name(model): dynamic_cache}, **GREEDY)
    hit = radix.generate(ids, **GREEDY)
    assert torch.equal(torch.stack(hit.logits), torch.stack(expected.logits))
    assert radix.counts.num_cached_tokens == 61


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("capacity_tokens", [160, 2048])
def test_random_calls_get_the_answers_of_generate(kind: str, capacity_tokens: int) -> None:
    model, random = model_of(KINDS[kind]), Random(capacity_tokens)
    radix = RadixCache(model, capacity_tokens, block_size=4)
    sequences = [prompt(2, 30)]  # prompts continue the beginning of one of these
    num_hits = 0
    for _ in range(18):
        prompts = []
        for _ in range(random.choice((1, 1, 2, 3))):
            sequence = random.choice(sequences)
            prefix = sequence[:, : random.randint(1, sequence.shape[1])]
            suffix = torch.tensor([[random.randint(3, VOCAB_SIZE - 1) for _ in range(random.randint(1, 12))]])
            prompts.append(torch.cat([prefix, suffix], dim=1))
        inputs = padded(prompts)
        before = radix.counts.num_cached_tokens
        out = radix.generate(**inputs, **GREEDY)
        num_hits += radix.counts.num_cached_tokens > before
        assert same(out, model.generate(**inputs, **GREEDY))
        for row, tokens in zip(out.sequences, prompts, strict=True):
            num_padding = inputs["input_ids"].shape[1] - tokens.shape[1]
            sequences.append(row[num_padding:][None])
        sequences = [sequence for sequence in sequences[-8:] if sequence.shape[1] < 150]
        assert radix.counts.num_used_blocks <= capacity_tokens // 4
    assert num_hits > 9
    assert (radix.counts.num_evicted_blocks > 0) is (capacity_tokens == 160)


def test_a_turn_reuses_the_answer_of_the_turn_before_it(llama: Any) -> None:
    radix = RadixCache(llama, 1024, block_size=16)
    answer = radix.generate(prompt(1, 21), **GREEDY).sequences
    assert radix.cache_for(torch.cat([answer, prompt(3, 5)], dim=1)).num_cached_tokens == (21 + 7,), (
        "the K/V of the last token were not needed, and so not computed"
    )
    radix.clear()
    radix.generate(prompt(1, 21), write_generated=False, **GREEDY)
    assert radix.cache_for(torch.cat([answer, prompt(3, 5)], dim=1)).num_cached_tokens == (21,)


@pytest.mark.parametrize("write_generated", [False, True])
def test_a_windowed_layer_keeps_the_window_and_a_block_however_long_the_answer_is(write_generated: bool) -> None:
    model = model_of(KINDS["mistral"])
    radix, ids = RadixCache(model, 1024, block_size=4), prompt(1, 30)
    with radix.cache_for(ids, write_generated=write_generated) as cache:
        model.generate(ids, **{cache_name(model): cache}, **GREEDY | {"max_new_tokens": 60})
        records = cache._records.values()
        assert len(records) == (3 if write_generated else 0)
        assert all(sum(keys.shape[2] for keys, _ in each.pieces) <= 4 for each in records)


def test_a_cache_that_is_passed_to_generate_publishes_whole_blocks_without_being_closed(llama: Any) -> None:
    radix, ids = RadixCache(llama, 1024, block_size=4), prompt(1, 21)
    cache = radix.cache_for(ids)
    sequences = llama.generate(ids, **{cache_name(llama): cache}, **GREEDY).sequences
    later = torch.cat([sequences, prompt(3, 5)], dim=1)
    assert radix.cache_for(later).num_cached_tokens == (28,)
    radix.generate(ids, **GREEDY | {"max_new_tokens": 10})
    assert radix.cache_for(torch.cat([sequences, prompt(3, 5)], dim=1)).num_cached_tokens == (29,), "closed"


def test_generated_tokens_are_read_from_the_device_once_per_block(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    copied_shapes: list[tuple[int, ...]] = []

    def recorded_copy(input_ids: torch.Tensor) -> np.ndarray[Any, Any]:
        copied_shapes.append(tuple(input_ids.shape))
        return input_ids.numpy().astype(np.uint32)

    monkeypatch.setattr(prompt_cache, "_copy_to_host", recorded_copy)
    radix, ids = RadixCache(llama, 1024, block_size=8), prompt(1, 20)
    radix.generate(ids, **GREEDY | {"max_new_tokens": 22})
    # The prompt is read twice, to verify it and to publish it. Of the 21 new tokens with K/V, 4 fill its last block.
    assert copied_shapes == [(1, 20), (1, 20), (1, 4), (1, 8), (1, 8), (1, 1)]


def test_tokens_are_published_although_the_caller_overwrites_its_tensor(llama: Any) -> None:
    radix, ids = RadixCache(llama, 1024, block_size=4), prompt(1, 20)
    buffer = torch.zeros(1, 1, dtype=torch.long)
    with radix.cache_for(ids[:, :12]) as cache, torch.no_grad():
        forward(llama, cache, ids[:, :12])
        for position in range(12, 20):
            buffer.copy_(ids[:, position : position + 1])
            forward(llama, cache, buffer)
    assert radix.cache_for(torch.cat([ids, ids], dim=1)).num_cached_tokens == (20,)


def test_one_cache_can_continue_over_several_calls(llama: Any) -> None:
    radix, ids = RadixCache(llama, 1024), prompt(1, 21)
    with radix.cache_for(ids) as cache:
        first = llama.generate(ids, **{cache_name(llama): cache}, **GREEDY).sequences
        ids = torch.cat([first, prompt(3, 5)], dim=1)
        second = llama.generate(ids, **{cache_name(llama): cache}, **GREEDY)
    assert same(second, llama.generate(ids, **GREEDY))
    assert radix.cache_for(second.sequences).num_cached_tokens == (second.sequences.shape[1] - 1,)


def test_branches_share_blocks_and_only_their_own_tokens_need_new_ones(llama: Any) -> None:
    radix = RadixCache(llama, 1024, block_size=16)
    for branch in range(5):
        radix.generate(torch.cat([prompt(1, 64), prompt(branch, 4, 12)], dim=1), max_new_tokens=1)
    assert radix.counts.num_used_blocks == 64 // 16 + 5
    one_token = 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, bytes
    assert radix.num_bytes == 1024 * one_token


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3"])
def test_a_padded_batch_reuses_what_ends_at_the_same_position_in_all_rows(kind: str) -> None:
    model = model_of(KINDS[kind])
    radix = RadixCache(model, 1024)
    radix.generate(prompt(1, 40), **GREEDY)
    inputs = padded([torch.cat([prompt(1, 40), prompt(5, length)], dim=1) for length in (2, 9, 30)])
    expected = model.generate(**inputs, **GREEDY)
    with record_forward_sizes(model) as sizes:
        assert same(radix.generate(**inputs, **GREEDY), expected)
    assert sizes[0] == 3 * 30, "the longest row computes 30 tokens, and the others as many"
    with record_forward_sizes(model) as sizes:
        assert same(radix.generate(**inputs, **GREEDY), expected)
    assert sizes[0] == 3
    alone = radix.cache_for(torch.cat([prompt(1, 40), prompt(5, 9)], dim=1))
    assert alone.num_cached_tokens == (48,), "rows of a batch are published without their padding"


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
        {"prefill_chunk_size": 7},
    ],
    ids=str,
)
def test_other_ways_to_generate_give_the_tokens_of_generate(kind: str, options: dict[str, Any]) -> None:
    model = model_of(KINDS[kind])
    if "prefill_chunk_size" in options and cache_name(model) != CACHE_NAMES[0]:
        pytest.skip("chunks of older releases do not begin after what is in the cache")
    radix = RadixCache(model, 1024, block_size=4)
    for tail in (9, 12, 12):
        ids = torch.cat([prompt(1, 41), prompt(1, 41)[:, :tail]], dim=1)
        torch.manual_seed(1)
        expected = model.generate(ids, max_new_tokens=12, **options)
        torch.manual_seed(1)
        assert torch.equal(radix.generate(ids, max_new_tokens=12, **options), expected)
    # The second prompt continues the first one, of 41 + 9 tokens; the third one equals the second one, of 53 tokens.
    assert radix.counts.num_cached_tokens == 50 + 52
    greedy = radix.generate(expected[:1], **GREEDY)
    assert same(greedy, model.generate(expected[:1], **GREEDY)), (
        "the published tokens of the first answer have the right K/V"
    )


def test_options_of_the_model_apply_unless_the_call_has_others(llama: Any) -> None:
    llama.generation_config.num_beams = 3
    llama.generation_config.prompt_lookup_num_tokens = 3
    radix, ids = RadixCache(llama, 1024), prompt(1, 20)
    with pytest.raises(InvalidRequest, match="prompt_lookup_num_tokens: assisted decoding"):
        radix.generate(ids, max_new_tokens=6)
    for options in (
        {"prompt_lookup_num_tokens": 0, "max_new_tokens": 6},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=0, max_new_tokens=6)},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=0, num_beams=2, max_new_tokens=6)},
    ):
        assert torch.equal(radix.generate(ids, **options), llama.generate(ids, **options))


def test_assisted_decoding_is_refused_since_it_does_not_continue_a_cache(llama: Any) -> None:
    radix, ids = RadixCache(llama, 1024), prompt(1, 41)
    for options in ({"assistant_model": llama}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(InvalidRequest, match="assisted decoding of transformers computes the whole prompt"):
            radix.generate(ids, **options, **GREEDY)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_tokens_after_a_crop_replace_the_cropped_ones(kind: str) -> None:
    model = model_of(KINDS[kind])
    radix, ids = RadixCache(model, 1024, block_size=4), prompt(1, 41)
    with radix.cache_for(ids) as cache, torch.no_grad():
        cache.activate_past_recording()
        forward(model, cache, torch.cat([ids, prompt(2, 5)], dim=1))
        cache.crop(-5)
        forward(model, cache, prompt(3, 6))
        cache.crop(-2)
        logits = forward(model, cache, prompt(4, 3)).logits
    whole = torch.cat([ids, prompt(3, 6)[:, :4], prompt(4, 3)], dim=1)
    assert close(logits, model(whole).logits[:, -3:])
    assert radix.cache_for(whole).num_cached_tokens == (47,)
    assert same(radix.generate(whole, **GREEDY), model.generate(whole, **GREEDY))


def test_a_crop_to_tokens_whose_window_is_missing_is_refused() -> None:
    model = model_of(KINDS["mistral"])
    radix, ids = RadixCache(model, 1024, block_size=4), prompt(1, 60)
    radix.generate(ids, **GREEDY)
    with torch.no_grad():
        cache = radix.cache_for(ids)
        forward(model, cache, ids[:, -1:])
        with pytest.raises(InvalidRequest, match="crop: expected to keep at least 60 tokens, got 59"):
            cache.crop(-1)
        cache = radix.cache_for(ids)
        cache.activate_past_recording()
        forward(model, cache, ids[:, -1:])
        with pytest.raises(InvalidRequest, match="crop: expected to keep at least 59 tokens, got 58"):
            cache.crop(-2)
        cache.crop(-1)
        assert close(forward(model, cache, ids[:, -1:]).logits[:, -1], model(ids).logits[:, -1])


def test_each_sampled_branch_is_published(llama: Any) -> None:
    radix = RadixCache(llama, 1024, block_size=4)
    out = radix.generate(prompt(1, 20), do_sample=True, num_return_sequences=4, max_new_tokens=9)
    assert len({tuple(row) for row in out.tolist()}) == 4
    for row in out:
        assert radix.cache_for(row[None]).num_cached_tokens == (28,)


def test_a_prompt_of_several_completions_is_published_once(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written_ranges: list[tuple[int, int]] = []
    write = KVSlots.write

    def recorded_write(slots: KVSlots, block_ids: Any, start: int, end: int, kv: Any) -> None:
        written_ranges.append((start, end))
        write(slots, block_ids, start, end, kv)

    monkeypatch.setattr(KVSlots, "write", recorded_write)
    radix = RadixCache(llama, 1024, block_size=4)
    radix.generate(prompt(1, 22), num_return_sequences=3, do_sample=True, max_new_tokens=1)
    assert written_ranges == [(0, 22)]


@pytest.mark.parametrize("owner", [{"tenant": "acme"}, {"salt": "one"}], ids=str)
def test_nothing_is_shared_between_tenants_or_salts(llama: Any, owner: dict[str, str]) -> None:
    radix, ids = RadixCache(llama, 1024), prompt(1, 30)
    radix.generate(ids, **GREEDY)
    assert radix.cache_for(ids).num_cached_tokens == (29,)
    assert radix.cache_for(ids, **owner).num_cached_tokens == (0,)
    radix.generate(ids, **owner, **GREEDY)
    radix.clear(**owner)
    assert radix.cache_for(ids, **owner).num_cached_tokens == (0,)
    assert radix.cache_for(ids).num_cached_tokens == (29,)


def halve_weight_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)


def replace_parameter(model: Any) -> None:
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.5)


def double_buffer(model: Any) -> None:
    model.model.layers[0].self_attn.k_proj.scale.mul_(2)


def load_other_weights(model: Any) -> None:
    model.load_state_dict(model_of(KINDS["llama"], seed=5).state_dict(), strict=False)


def convert_to_bfloat16(model: Any) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize(
    "change", [halve_weight_in_place, double_buffer, replace_parameter, load_other_weights, convert_to_bfloat16]
)
def test_changed_weights_clear_the_cache(llama: Any, change: Any) -> None:
    layer = llama.model.layers[0].self_attn.k_proj
    layer.register_buffer("scale", torch.tensor(1.0))  # quantized layers have such buffers
    layer.register_forward_hook(lambda layer, _, output: output * layer.scale)
    radix, ids = RadixCache(llama, 1024), prompt(1, 30)
    radix.generate(ids, **GREEDY)
    change(llama)
    assert torch.equal(radix.generate(ids, **GREEDY).sequences, llama.generate(ids, **GREEDY).sequences)
    assert radix.counts.num_cached_tokens == 0
    assert radix.cache_for(ids).num_cached_tokens == (29,)


def test_what_was_reused_before_a_change_is_not_published_after_it(llama: Any) -> None:
    radix, ids = RadixCache(llama, 1024), prompt(1, 30)
    for change in (halve_weight_in_place, lambda _: radix.clear()):
        radix.generate(ids, **GREEDY)
        earlier_cache = radix.cache_for(ids)
        assert earlier_cache.num_cached_tokens == (29,)
        change(llama)
        radix.generate(prompt(2, 30), **GREEDY)
        forward(llama, earlier_cache, ids[:, -1:])
        assert radix.cache_for(ids).num_cached_tokens == (0,)


@pytest.mark.parametrize("owner", [{}, {"tenant": "acme"}, {"salt": "one"}, {"tenant": "acme", "salt": "one"}], ids=str)
def test_a_generation_that_began_before_a_clear_publishes_nothing_after_it(llama: Any, owner: dict[str, str]) -> None:
    radix, ids = RadixCache(llama, 1024, block_size=4), prompt(1, 30)

    def clear(input_ids: torch.Tensor, _: object, **__: object) -> torch.Tensor:
        if input_ids.shape[1] == 36:  # six tokens were generated, and four of them published
            assert radix.cache_for(input_ids, **owner).num_cached_tokens == (32,)
            radix.clear(**owner)
        return torch.zeros(1, dtype=torch.bool)

    with radix.cache_for(ids, **owner) as earlier_cache:
        options = GREEDY | {"max_new_tokens": 20, "stopping_criteria": StoppingCriteriaList([clear])}
        answer = radix.generate(ids, **owner, **options).sequences
        assert radix.cache_for(answer, **owner).num_cached_tokens == (0,)
        llama.generate(ids, **{cache_name(llama): earlier_cache}, **GREEDY)
    assert radix.cache_for(answer, **owner).num_cached_tokens == (0,), "the cache was created before the clear"
    radix.generate(ids, **owner, **GREEDY)
    assert radix.cache_for(answer, **owner).num_cached_tokens == (37,)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses names that transformers has renamed
def test_active_lora_adapters_share_nothing_with_others(llama: Any) -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(llama, peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False))
    with pytest.raises(UnsupportedModel, match=r"PeftModel.*: expected a model of transformers.*get_base_model"):
        RadixCache(wrapped)
    radix, ids = RadixCache(wrapped.get_base_model(), 1024), prompt(1, 30)
    radix.generate(ids, **GREEDY)
    assert radix.cache_for(ids).num_cached_tokens == (29,)
    with wrapped.disable_adapter():
        assert radix.cache_for(ids).num_cached_tokens == (0,)
        assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    assert radix.cache_for(ids).num_cached_tokens == (29,)
    longer = torch.cat([ids, prompt(3, 5)], dim=1)
    earlier_cache = radix.cache_for(longer)
    with wrapped.disable_adapter(), pytest.raises(InvalidRequest, match="expected the LoRA adapters that were active"):
        llama.generate(longer, **{cache_name(llama): earlier_cache}, **GREEDY)
    assert radix.cache_for(longer).num_cached_tokens == (30,), "what other adapters compute is not published"


def test_a_call_that_fails_leaves_nothing_behind(llama: Any) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object, **__: object) -> bool:
        raise Interrupted

    radix, ids = RadixCache(llama, 64, block_size=4), prompt(1, 50)
    with pytest.raises(Interrupted):
        radix.generate(ids, stopping_criteria=StoppingCriteriaList([interrupt]), **GREEDY)
    assert radix.cache_for(ids).num_cached_tokens == (49,), "the prompt was computed before"
    hook = llama.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        radix.generate(prompt(4, 50), **GREEDY)
    hook.remove()
    assert radix.cache_for(prompt(4, 50)).num_cached_tokens == (0,)
    other = prompt(6, 60)
    assert same(radix.generate(other, **GREEDY), llama.generate(other, **GREEDY))
    assert radix.counts.num_used_blocks == 16, "the blocks of all other prompts could be evicted"


def test_a_prompt_beyond_the_capacity_is_computed_and_cached_in_part(llama: Any) -> None:
    radix, ids = RadixCache(llama, 64, block_size=4), prompt(1, 90)
    assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    assert radix.cache_for(ids).num_cached_tokens == (64,)
    assert same(radix.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


def test_an_answer_beyond_the_capacity_evicts_nothing(llama: Any) -> None:
    radix, ids = RadixCache(llama, 64, block_size=4), prompt(1, 30)
    answer = radix.generate(ids, **GREEDY | {"max_new_tokens": 60}).sequences
    assert radix.counts.num_evicted_blocks == 0
    assert radix.cache_for(answer).num_cached_tokens == (64,)


def test_a_windowed_prefix_that_was_evicted_meanwhile_is_not_published() -> None:
    model = model_of(KINDS["mistral"])
    radix = RadixCache(model, 64, block_size=4)
    radix.generate(prompt(1, 40), **GREEDY)
    ids = prompt(1, 40, 9)
    cache = radix.cache_for(ids)
    assert cache.num_cached_tokens == (40,)
    radix.generate(prompt(8, 60), **GREEDY)  # evicts the prefix
    assert same(model.generate(ids, **{cache_name(model): cache}, **GREEDY), model.generate(ids, **GREEDY))
    assert radix.cache_for(ids).num_cached_tokens == (0,)
    assert same(radix.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


def test_values_that_are_not_finite_are_not_published(llama: Any) -> None:
    radix, ids = RadixCache(llama, 1024), prompt(1, 30)
    hook = llama.model.layers[1].self_attn.v_proj.register_forward_hook(lambda _, __, out: out * torch.inf)
    llama(ids, **{cache_name(llama): radix.cache_for(ids)})
    hook.remove()
    assert radix.cache_for(ids).num_cached_tokens == (0,)


def test_blocks_written_in_inference_mode_can_be_used_outside_of_it(llama: Any) -> None:
    radix, ids = RadixCache(llama, 1024), prompt(1, 30)
    with torch.inference_mode():
        radix.generate(ids, **GREEDY)
    cache = radix.cache_for(ids)
    llama(ids[:, -1:], **{cache_name(llama): cache}).logits.sum().backward()
    longer = torch.cat([ids, prompt(4, 5)], dim=1)
    assert same(radix.generate(longer, **GREEDY), llama.generate(longer, **GREEDY))


def test_several_threads_get_the_answers_of_generate() -> None:
    model = model_of(KINDS["gemma3"])
    radix = RadixCache(model, 256, block_size=4)
    assert generate_in_threads(radix, model) == []
    assert radix.counts.num_prompts == 3 * 9


def test_two_caches_of_one_model_are_separate(llama: Any) -> None:
    first, second, ids = RadixCache(llama, 1024), RadixCache(llama, 1024), prompt(1, 30)
    assert same(first.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))
    assert second.cache_for(ids).num_cached_tokens == (0,)
    assert same(second.generate(ids, **GREEDY), llama.generate(ids, **GREEDY))


def test_a_closed_cache_frees_its_memory_and_leaves_the_model_as_it_was(llama: Any) -> None:
    with RadixCache(llama, 1024) as radix:
        radix.generate(prompt(1, 30), **GREEDY)
        assert radix.num_bytes > 0
        assert len(llama._forward_pre_hooks) == len(llama._forward_hooks) == 1
    assert radix.num_bytes == 0
    assert not llama._forward_pre_hooks
    assert not llama._forward_hooks
    with pytest.raises(LifecycleError, match="RadixCache: it was closed"):
        radix.generate(prompt(1, 30), **GREEDY)


def test_a_generation_fails_if_its_radix_cache_is_closed_meanwhile(llama: Any) -> None:
    radix = RadixCache(llama, 1024)

    def close_radix(*_: object, **__: object) -> torch.Tensor:
        radix.close()
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(InvalidRequest, match="or one after the RadixCache was closed"):
        radix.generate(prompt(1, 30), stopping_criteria=StoppingCriteriaList([close_radix]), **GREEDY)
    assert radix.num_bytes == 0


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        (lambda: model_of(small_config("lfm2")), "Lfm2ForCausalLM: .*got LinearAttentionLayer"),
        (lambda: model_of(MambaConfig(**{**SHAPE, "num_hidden_layers": 1})), "MambaForCausalLM: .*recurrent states"),
        (lambda: model_of(small_config("deepseek_v32")), "DeepseekV32ForCausalLM: .*got DynamicIndexedLayer"),
        (lambda: model_of(small_config("mpt")), "MptForCausalLM: transformers computes other results"),
        (lambda: T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)), "encoder"),
        (lambda: torch.nn.Linear(2, 2), "Linear: expected a model of transformers"),
    ],
    ids=["short convolutions", "state space", "indexer", "mpt", "encoder-decoder", "another module"],
)
def test_models_with_other_states_are_refused_by_name(make_model: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        RadixCache(make_model())


def test_a_model_whose_rope_depends_on_the_length_is_limited_to_shorter_prompts() -> None:
    config = small_config("llama")
    config.max_position_embeddings = 40
    config.rope_parameters = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    radix = RadixCache(model_of(config), 1024)
    with pytest.raises(PromptTooLong, match=r"input_ids\[0\]: expected at most 40 tokens, got 41; dynamic RoPE"):
        radix.generate(prompt(1, 41), **GREEDY)
    answer = radix.generate(prompt(1, 38), **GREEDY).sequences
    assert radix.cache_for(answer[:, :40]).num_cached_tokens == (39,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity_tokens": 8}, "capacity_tokens: expected at least one block of 16 tokens, got 8"),
        ({"block_size": 0}, "block_size: expected at least 1, got 0"),
    ],
)
def test_wrong_sizes_are_refused(llama: Any, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        RadixCache(llama, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": torch.ones(3, dtype=torch.long)}, r"input_ids: expected token ids \[batch, length\], got"),
        ({"input_ids": torch.ones(1, 3)}, r"input_ids: expected token ids .*float32 \[1, 3\]"),
        ({"input_ids": torch.tensor([[1, 999]])}, r"input_ids\[0\]: expected token ids from 0 to 299"),
        (
            {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 0]])},
            r"attention_mask\[0\]: expected padding on the left",
        ),
        (
            {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.tensor([[1, 1]])},
            r"attention_mask: expected the shape of input_ids, \[1, 3\], got \[1, 2\]",
        ),
        ({"input_ids": torch.ones(1, 3, dtype=torch.long), "num_sequences": 0}, "num_sequences: expected at least 1"),
    ],
)
def test_wrong_prompts_are_refused(llama: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        RadixCache(llama).cache_for(**arguments)


def test_a_model_in_training_mode_is_refused(llama: Any) -> None:
    radix = RadixCache(llama)
    llama.train()
    with pytest.raises(InvalidRequest, match=r"training mode; call model.eval\(\)"):
        radix.generate(prompt(1, 5))


def test_forward_passes_that_do_not_continue_the_cache_are_refused(llama: Any) -> None:
    radix, ids = RadixCache(llama, 1024), prompt(1, 20)
    radix.generate(ids, **GREEDY)
    longer = torch.cat([ids, prompt(3, 6)], dim=1)
    with pytest.raises(InvalidRequest, match=r"input_ids\[0\] differ from those"):
        forward(llama, radix.cache_for(longer), longer)  # all tokens, though some are in the cache
    other = torch.cat([ids, prompt(4, 6)], dim=1)
    with pytest.raises(InvalidRequest, match=r"input_ids\[0\] differ from those"):
        llama.generate(other, **{cache_name(llama): radix.cache_for(longer)}, **GREEDY)
    with pytest.raises(InvalidRequest, match="for 1 sequences, got input_ids of 2; with num_beams"):
        llama.generate(longer, num_beams=2, max_new_tokens=2, **{cache_name(llama): radix.cache_for(longer)})
    with pytest.raises(InvalidRequest, match="one of another model or of a part of it"):
        forward(model_of(KINDS["llama"]), radix.cache_for(longer), longer)
    other_model = model_of(KINDS["llama"])
    with RadixCache(other_model), pytest.raises(InvalidRequest, match="belongs to another model"):
        forward(other_model, radix.cache_for(longer), longer)
    suffix = longer[:, 20:]
    for options, message in (
        ({"position_ids": torch.arange(6)[None]}, "position_ids: expected those of each token"),
        ({"attention_mask": torch.tensor([[0] + [1] * 25])}, "attention_mask differs"),
        ({"attention_mask": torch.ones(1, 6, dtype=torch.long)}, "attention_mask differs"),
        ({"pixel_values": torch.ones(1)}, "expected a forward pass of input_ids only, got pixel_values"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            forward(llama, radix.cache_for(longer), suffix, **options)
    with pytest.raises(InvalidRequest, match="got inputs_embeds"):
        forward(llama, radix.cache_for(longer), inputs_embeds=llama.get_input_embeddings()(suffix))
    with pytest.raises(InvalidRequest, match="creates the cache itself"):
        radix.generate(longer, **{CACHE_NAMES[0]: radix.cache_for(longer)})
    assert radix.cache_for(longer).num_cached_tokens == (20,), "nothing of these calls was published"
    assert np.isfinite(forward(llama, radix.cache_for(longer), suffix).logits.detach().numpy()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": torch.tensor([[25]])}, "position_ids: expected those of each token"),
        ({"attention_mask": torch.tensor([[0] + [1] * 20])}, "attention_mask differs"),
        ({"attention_mask": torch.ones(1, 1, dtype=torch.long)}, "attention_mask differs"),
    ],
)
def test_decoded_tokens_at_other_positions_or_with_other_masks_are_refused(
    llama: Any, options: dict[str, Any], message: str
) -> None:
    radix, ids = RadixCache(llama, 1024), prompt(1, 20)
    cache = radix.cache_for(ids)
    forward(llama, cache, ids)
    with pytest.raises(InvalidRequest, match=message):
        forward(llama, cache, prompt(2, 1), **options)
    for position in (20, 21):
        forward(llama, cache, prompt(position, 1), position_ids=torch.tensor([[position]]))
    cache.close()
    continued = torch.cat([ids, *(prompt(each, 1) for each in (20, 21, 22))], dim=1)
    assert radix.cache_for(continued).num_cached_tokens == (22,), "the other tokens were published"


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("model_type", covered_types())
def test_model_types_give_the_tokens_of_generate_or_are_refused(model_type: str) -> None:
    model = model_of(small_config(model_type))
    try:
        radix = RadixCache(model, 1024)
    except UnsupportedModel:
        assert model._is_stateful or model_type in REFUSED
        return
    assert model_type not in REFUSED
    for tail in (9, 11):
        ids = torch.cat([prompt(1, 60), prompt(tail, tail)], dim=1)
        max_difference = MAX_DIFFERENCES.get(model_type, MAX_DIFFERENCE)
        assert same(radix.generate(ids, **GREEDY), model.generate(ids, **GREEDY), max_difference)
    assert radix.counts.num_cached_tokens == 60


# Model types that are refused, besides those whose states transformers marks as recurrent (`_is_stateful`).
REFUSED = {
    "deepseek_v32",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "inkling_text",
    "lfm2",
    "lfm2_moe",
    "minimax",
    "mpt",
}
