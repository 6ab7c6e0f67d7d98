"""Describes the model, the server and its load to the gateway."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from radixkv import __version__
from radixkv.api.limits import Limits
from radixkv.api.stats import EngineLoad, EngineStats
from radixkv.config import Config, ModelConfig
from radixkv.config.model_directory import read_object
from radixkv.gateway import engine_common_pb2, vllm_engine_pb2
from radixkv.model_files.model_location import files_directory, locate
from radixkv.service.server.gateway.token_counter import TokenCounter

_MAX_INT32 = 2**31 - 1


def model_info(limits: Limits, eos_token_ids: Iterable[int], config: Config) -> vllm_engine_pb2.GetModelInfoResponse:
    """Describe the model, from its `config.json` if there is one."""
    directory = _directory(config.model)
    config_json = {} if directory is None else read_object(directory / "config.json")
    return vllm_engine_pb2.GetModelInfoResponse(
        model_path=_path_of(config.model),
        is_generation=True,
        max_context_length=limits.max_sequence_tokens,
        vocab_size=limits.vocab_size,
        served_model_name=config.gateway.model_name or limits.model,
        tokenizer_path=config.model.path if directory is None else str(directory.resolve()),
        model_type=str(config_json.get("model_type", "")),
        architectures=map(str, config_json.get("architectures") or ()),
        eos_token_ids=sorted(eos_token_ids),
        pad_token_id=_token_id(config_json, "pad_token_id"),
        bos_token_id=_token_id(config_json, "bos_token_id"),
        max_req_input_len=min(_MAX_INT32, limits.max_sequence_tokens - 1),
    )


def server_info(limits: Limits, stats: EngineStats, config: Config) -> vllm_engine_pb2.GetServerInfoResponse:
    """Describe the process."""
    requests = stats.load.requests
    return vllm_engine_pb2.GetServerInfoResponse(
        active_requests=requests.running + requests.waiting + requests.following,
        uptime_seconds=stats.uptime_s,
        server_type="radixkv",
        data_parallel_size=1,
        kv_cache_dtype=stats.kv_dtype,
        block_size=limits.block_size,
        max_num_seqs=min(_MAX_INT32, config.engine.max_running_requests),
    )


def loads_response(load: vllm_engine_pb2.SchedulerLoad) -> vllm_engine_pb2.GetLoadsResponse:
    """Write the load of the only data-parallel rank."""
    return vllm_engine_pb2.GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(timespec="milliseconds"),
        version=__version__,
        dp_rank_count=1,
        loads=[load],
    )


def load_record(load: vllm_engine_pb2.SchedulerLoad, sample: int) -> engine_common_pb2.EngineLoad:
    """Write a load record for an event stream."""
    return engine_common_pb2.EngineLoad(
        running_requests=load.num_running_reqs,
        waiting_requests=load.num_waiting_reqs,
        token_usage=load.token_usage,
        active_token_usage=load.token_usage,
        gen_throughput=load.gen_throughput,
        max_running_requests=load.max_running_requests,
        sample=sample,
        load_only=True,
        cache_hit_rate=load.cache_hit_rate,
        num_used_tokens=load.num_used_tokens,
        max_total_num_tokens=load.max_total_num_tokens,
    )


def scheduler_load(
    limits: Limits, load: EngineLoad, token_counter: TokenCounter, config: Config
) -> vllm_engine_pb2.SchedulerLoad:
    """Describe the load. Blocks that can be evicted count as free, because a warm cache can take more requests."""
    requests = load.requests
    num_waiting = requests.waiting + requests.following
    return vllm_engine_pb2.SchedulerLoad(
        num_running_reqs=requests.running,
        num_waiting_reqs=num_waiting,
        num_total_reqs=requests.running + num_waiting,
        num_used_tokens=min(_MAX_INT32, load.blocks.in_use * limits.block_size),
        max_total_num_tokens=min(_MAX_INT32, load.blocks.total * limits.block_size),
        token_usage=load.blocks.in_use / load.blocks.total,
        gen_throughput=token_counter.tokens_per_s(),
        cache_hit_rate=token_counter.hit_rate,
        utilization=load.blocks.in_use / load.blocks.total,
        max_running_requests=min(_MAX_INT32, config.engine.max_running_requests),
    )


def _directory(model: ModelConfig) -> Path | None:
    return None if model.path == "tiny" else files_directory(model.path)


def _path_of(model: ModelConfig) -> str:
    return model.path if model.path == "tiny" else str(locate(model.path).path.resolve())


def _token_id(config_json: dict[str, Any], name: str) -> int:
    token_id = config_json.get(name)
    return token_id if isinstance(token_id, int) and 0 <= token_id <= _MAX_INT32 else 0
