"""The descriptions of model, process and load that the gateway receives."""

import dataclasses
import json

from radixkv.api.stats import BlockStats
from radixkv.config import Config
from radixkv.service.server.gateway.descriptions import (
    load_record,
    loads_response,
    model_info,
    scheduler_load,
    server_info,
)
from radixkv.service.server.gateway.token_counter import TokenCounter
from tests.service.fake_engine import LIMITS, FakeEngine


def scheduler_load_of(engine_load):
    return scheduler_load(LIMITS, engine_load, TokenCounter(), Config())


def load_with_blocks(**blocks):
    """Return the load of the fake engine, whose 10 blocks of 16 tokens are in other states."""
    load = FakeEngine().load().result()
    return dataclasses.replace(load, blocks=dataclasses.replace(load.blocks, **blocks))


def test_the_embedded_model_is_described_by_the_limits_of_the_engine():
    info = model_info(LIMITS, frozenset({3, 2}), Config())
    assert (info.model_path, info.tokenizer_path, info.served_model_name) == ("tiny", "tiny", "fake")
    assert (info.is_generation, info.max_context_length, info.vocab_size) == (True, LIMITS.max_sequence_tokens, 256)
    assert (list(info.eos_token_ids), info.max_req_input_len) == ([2, 3], LIMITS.max_sequence_tokens - 1)


def test_a_model_directory_is_described_by_its_config_json(tmp_path):
    model_config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 7,
        "pad_token_id": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(model_config))
    config = Config.load(None, [f"model.path={tmp_path}", "gateway.model_name=chat"])
    info = model_info(LIMITS, (), config)
    assert (info.model_path, info.tokenizer_path) == (str(tmp_path), str(tmp_path))
    assert (info.served_model_name, info.model_type, list(info.architectures)) == (
        "chat",
        "llama",
        ["LlamaForCausalLM"],
    )
    assert (info.bos_token_id, info.pad_token_id) == (7, 0)


def test_the_process_is_described_by_its_stats_and_its_configuration():
    info = server_info(LIMITS, FakeEngine().stats().result(), Config.load(None, ["engine.max_running_requests=9"]))
    assert (info.active_requests, info.uptime_seconds, info.server_type) == (6, 1.5, "radixkv")
    assert (info.data_parallel_size, info.kv_cache_dtype, info.block_size, info.max_num_seqs) == (1, "int8", 16, 9)


def test_a_warm_full_cache_is_no_load():
    load = scheduler_load_of(load_with_blocks(free=0, leased=0, published=10, pinned=0, retained=0))
    assert (load.token_usage, load.utilization, load.num_used_tokens) == (0.0, 0.0, 0)
    assert load.max_total_num_tokens == 160


def test_blocks_in_use_are_load():
    load = scheduler_load_of(load_with_blocks(free=1, leased=2, published=7, pinned=3))
    assert (load.token_usage, load.num_used_tokens) == (0.5, 80)  # 2 leased and 3 pinned of 10 blocks, 16 tokens each


def test_requests_that_follow_another_one_wait():
    load = scheduler_load_of(FakeEngine().load().result())
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (0, 6, 6)


def test_numbers_of_tokens_beyond_the_range_of_the_message_are_capped():
    zeros = dict.fromkeys(("free", "published", "pinned", "retained", "retainable", "on_probation"), 0)
    blocks = BlockStats(total=2**31 - 1, leased=2**31 - 1, **zeros)
    load = scheduler_load_of(dataclasses.replace(load_with_blocks(), blocks=blocks))
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (2**31 - 1, 2**31 - 1, 1.0)


def test_a_load_is_the_same_in_a_response_and_in_a_stream():
    load = scheduler_load_of(load_with_blocks(free=1, leased=2, published=7, pinned=3))
    answer, record = loads_response(load), load_record(load, 4)
    assert (answer.dp_rank_count, list(answer.loads)) == (1, [load])
    assert answer.timestamp.startswith("20")
    assert (record.sample, record.load_only) == (4, True)
    assert (record.token_usage, record.active_token_usage, record.num_used_tokens) == (0.5, 0.5, 80)
    assert (record.running_requests, record.waiting_requests, record.max_running_requests) == (0, 6, 64)
