"""A module is tested in `test_<module>.py` in the folder of the same name, or in the file that is named here."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from .house import ROOT, imports, is_generated, modules, reachable

# Modules that are tested through another one: through a face, or together with their neighbors.
TESTED_IN = {
    "bench.fleet.bare_stream": "bench/fleet/test_decode_elsewhere.py",
    "bench.fleet.fleet_process": "bench/fleet/test_demo.py",
    "bench.gpu.dry_run": "bench/gpu/test_run.py",
    "bench.gpu.dry_trial": "bench/gpu/test_run.py",
    "bench.gpu.parts": "bench/gpu/test_run.py",
    "bench.gpu.prefill_bench": "bench/test_gpu_prefill.py",
    "bench.gpu.stage": "bench/gpu/test_run.py",
    "bench.gpu.stage_process": "bench/gpu/test_run.py",
    "bench.gpu.trials": "bench/gpu/test_run.py",
    "bench.gpu.verdicts": "bench/gpu/test_run.py",
    "bench.hostile.attacker": "bench/hostile/test_trial.py",
    "bench.hostile.attacks.attack": "bench/hostile/attacks/test_by_name.py",
    "bench.hostile.attacks.cancels": "bench/hostile/attacks/test_by_name.py",
    "bench.hostile.attacks.connections": "bench/hostile/attacks/test_by_name.py",
    "bench.hostile.attacks.deep_paths": "bench/hostile/attacks/test_by_name.py",
    "bench.hostile.attacks.flood": "bench/hostile/attacks/test_by_name.py",
    "bench.hostile.attacks.held_leases": "bench/hostile/attacks/test_by_name.py",
    "bench.hostile.attacks.messages": "bench/hostile/attacks/test_by_name.py",
    "bench.hostile.attacks.operators": "bench/hostile/attacks/test_by_name.py",
    "bench.hostile.fuzz.mutations": "bench/hostile/fuzz/test_run.py",
    "bench.hostile.fuzz.raw_bytes": "bench/hostile/fuzz/test_run.py",
    "bench.modes.mode": "bench/modes/test_modes.py",
    "bench.modes.picture": "bench/modes/test_modes.py",
    "bench.modes.traffic": "bench/modes/test_modes.py",
    "bench.parts.adapters.adapter_files": "bench/test_replay.py",
    "bench.parts.adapters.reusable_tokens": "bench/test_replay.py",
    "bench.parts.attention_inputs": "bench/test_kernels.py",
    "bench.parts.copy_inputs": "bench/test_kernels.py",
    "bench.parts.device_time": "bench/test_kernels.py",
    "bench.parts.kernel_row": "bench/test_kernels.py",
    "bench.parts.null_service": "bench/test_rpc.py",
    "bench.parts.peers.sglang_attention": "bench/test_kernels.py",
    "bench.parts.peers.sglang_tree": "bench/test_tree.py",
    "bench.parts.peers.sglang_wheel": "bench/test_kernels.py",
    "bench.parts.peers.transformers_prefix": "bench/test_gpu_prefill.py",
    "bench.parts.public.registration": "bench/test_replay.py",
    "bench.parts.row_inputs": "bench/test_kernels.py",
    "bench.parts.shared_prefix_inputs": "bench/test_kernels.py",
    "bench.stores.places": "bench/stores/test_run.py",
    "radixkv.api.adapters": "engine/adapters/test_adapters.py",
    "radixkv.api.caller": "service/server/test_servicer.py",
    "radixkv.api.constraint": "engine/test_allowed_tokens.py",
    "radixkv.api.events": "events/test_tree_feed.py",
    "radixkv.api.miss_reason": "cache/test_miss_reason.py",
    "radixkv.api.params": "engine/test_engine.py",
    "radixkv.api.public_prefixes": "engine/public/test_public_registry.py",
    "radixkv.api.result": "engine/test_core.py",
    "radixkv.api.retention": "cache/test_retained_nodes.py",
    "radixkv.api.segments": "cache/listing/test_segment_index.py",
    "radixkv.api.stats": "telemetry/test_gauges.py",
    "radixkv.blocks": "cache/test_block_pool.py",
    "radixkv.cache.audit": "cache/test_prefix_cache.py",
    "radixkv.cache.elsewhere.fetched": "engine/offload/test_offload.py",
    "radixkv.cache.elsewhere.found": "cache/elsewhere/test_elsewhere.py",
    "radixkv.cache.elsewhere.keyed_block": "cache/elsewhere/test_elsewhere.py",
    "radixkv.cache.elsewhere.store_listener": "events/test_store_feed.py",
    "radixkv.cache.holdings": "cache/test_prefix_cache.py",
    "radixkv.cache.ledger": "cache/test_lease.py",
    "radixkv.cache.lines.eviction_lines": "cache/lines/test_line_heap.py",
    "radixkv.cache.namespaces.forest": "cache/namespaces/test_purge.py",
    "radixkv.cache.namespaces.open_leases": "cache/namespaces/test_purge.py",
    "radixkv.cache.policies.by_name": "cache/policies/test_classic.py",
    "radixkv.cache.policies.lifetimes": "cache/policies/test_adaptive.py",
    "radixkv.cache.policies.policy": "cache/policies/test_classic.py",
    "radixkv.cache.public.hung_lease": "cache/public/test_places.py",
    "radixkv.cache.public.public_prefix": "cache/public/test_places.py",
    "radixkv.cache.tree.node": "cache/tree/test_radix_tree.py",
    "radixkv.compute.compression.kept_entries": "engine/compression/test_compressions.py",
    "radixkv.compute.forward": "model/test_model.py",
    "radixkv.compute.graphs.buffers": "compute/graphs/test_graphs.py",
    "radixkv.compute.graphs.shapes": "compute/graphs/test_graphs.py",
    "radixkv.compute.runner": "model/test_model.py",
    "radixkv.config.bounds": "config/test_reading.py",
    "radixkv.config.cache_section": "config/test_reading.py",
    "radixkv.config.model_section": "config/test_reading.py",
    "radixkv.config.sections": "config/test_reading.py",
    "radixkv.config.tenant_section": "config/test_reading.py",
    "radixkv.engine.adapters.adapter_device": "engine/adapters/test_adapters.py",
    "radixkv.engine.adapters.keyed_prompt": "engine/adapters/test_adapters.py",
    "radixkv.engine.answers": "engine/test_core.py",
    "radixkv.engine.delivery": "engine/test_core.py",
    "radixkv.engine.early_ends": "engine/test_core.py",
    "radixkv.engine.endings": "engine/test_core.py",
    "radixkv.engine.growth": "whole/test_generation.py",
    "radixkv.engine.offload.load": "engine/offload/test_offload.py",
    "radixkv.engine.offload.loader": "engine/offload/test_offload.py",
    "radixkv.engine.step": "engine/test_steps_ahead.py",
    "radixkv.engine.tally": "telemetry/test_gauges.py",
    "radixkv.errors": "rules/test_errors.py",
    "radixkv.events.replays": "events/test_zmq_publisher.py",
    "radixkv.events.snapshot": "events/test_tree_feed.py",
    "radixkv.events.stored_blocks": "events/test_tree_feed.py",
    "radixkv.kernels.attention_merge": "kernels/test_paged_attention.py",
    "radixkv.kernels.attention_softmax": "kernels/test_paged_attention.py",
    "radixkv.kernels.batch": "kernels/test_reference.py",
    "radixkv.kernels.cpu_attention_merge": "kernels/test_cpu_attention.py",
    "radixkv.kernels.cpu_attention_work": "kernels/test_cpu_attention_plan.py",
    "radixkv.kernels.norm_style": "kernels/test_norm.py",
    "radixkv.kernels.scoring": "kernels/test_reference.py",
    "radixkv.kernels.stored_numbers": "kernels/test_paged_attention.py",
    "radixkv.model.adapters.adapter_range": "model/adapters/test_adapted_layers.py",
    "radixkv.model.adapters.layers": "model/adapters/test_adapter_files.py",
    "radixkv.model.adapters.low_rank_products": "model/adapters/test_adapted_layers.py",
    "radixkv.model.attention.interface": "startup/test_attention_choice.py",
    "radixkv.model.attention.torch_kernels": "model/test_model.py",
    "radixkv.model.part_trial": "model/test_fused_modules.py",
    "radixkv.model.refusals": "model/test_loading.py",
    "radixkv.model.replaced_parts": "model/test_fused_modules.py",
    "radixkv.scheduling.held_leases": "engine/test_core.py",
    "radixkv.scheduling.request": "scheduling/test_scheduler.py",
    "radixkv.scheduling.tenant_queue": "scheduling/test_shares.py",
    "radixkv.service.client.access": "service/client/test_client.py",
    "radixkv.service.client.async_client": "service/client/test_client.py",
    "radixkv.service.client.channel": "service/client/test_client.py",
    "radixkv.service.client.lease_calls": "whole/test_transfer.py",
    "radixkv.service.client.public_prefixes": "service/server/public/test_public_calls.py",
    "radixkv.service.client.requests": "service/client/test_client.py",
    "radixkv.service.client.route_calls": "service/cluster/test_ingress_server.py",
    "radixkv.service.cluster.question": "service/cluster/test_fleet_state.py",
    "radixkv.service.cluster.servicers": "service/cluster/test_ingress_server.py",
    "radixkv.service.commands.connection_arguments": "service/commands/test_client_commands.py",
    "radixkv.service.commands.planning.hit_rate_plot": "service/commands/planning/test_simulate_command.py",
    "radixkv.service.commands.planning.model_arguments": "service/commands/planning/test_plan_command.py",
    "radixkv.service.commands.planning.plan_report": "service/commands/planning/test_plan_command.py",
    "radixkv.service.commands.planning.progress_bar": "service/commands/planning/test_simulate_command.py",
    "radixkv.service.missing_package": "service/commands/test_serve_command.py",
    "radixkv.service.server.calls": "service/server/test_servicer.py",
    "radixkv.service.server.generation.options": "service/server/test_generate.py",
    "radixkv.service.server.identity.http_guard": "service/server/test_metrics_port.py",
    "radixkv.service.server.identity.identity": "service/server/identity/test_rpc_rules.py",
    "radixkv.service.server.listen_address": "service/server/test_server.py",
    "radixkv.service.server.messages": "service/server/test_servicer.py",
    "radixkv.service.server.optional_services": "service/server/gateway/test_servicer.py",
    "radixkv.service.server.shared_parts": "service/server/gateway/test_servicer.py",
    "radixkv.service.server.transfer.kv_fetcher": "service/server/transfer/test_kv_sender.py",
    "radixkv.startup.graph_check": "compute/graphs/test_graphs.py",
    "radixkv.storage.kv_layout": "planning/test_plan.py",
    "radixkv.storage.tiers.disk_directory": "storage/tiers/test_disk.py",
}


def own_test(name: str) -> Path:
    """The path of the test file that is named like a module."""
    parts = name.removeprefix("radixkv.").split(".")
    return ROOT.joinpath("tests", *parts[:-1], f"test_{parts[-1]}.py")


SOURCES = sorted(
    name
    for name, path in modules().items()
    if path.name not in ("__init__.py", "__main__.py") and not is_generated(name)
)


@cache
def names_in(path: Path) -> frozenset[str]:
    """The names that a file of tests imports."""
    return frozenset(imports(path.read_text(encoding="utf-8"), ".".join(path.relative_to(ROOT).parent.parts)))


@cache
def helpers_of(path: Path) -> frozenset[Path]:
    """The files of helpers that a file of tests imports."""
    files = (ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names_in(path))
    return frozenset(file for file in files if file.is_file())


@cache
def loaded_by(file: Path) -> frozenset[str]:
    """Modules of ours that are loaded by what a test file and the helpers that it imports import."""
    names: set[str] = set()
    left: list[Path] = [file]
    seen: set[Path] = set()
    while left:
        path = left.pop()
        if path not in seen:
            seen.add(path)
            names |= names_in(path)
            left += helpers_of(path)
    return frozenset(reachable(names))


def test_a_module_is_tested_where_it_is_looked_for() -> None:
    files = {name: ROOT / "tests" / TESTED_IN[name] if name in TESTED_IN else own_test(name) for name in SOURCES}
    missing = {name: str(file.relative_to(ROOT)) for name, file in files.items() if not file.exists()}
    assert missing == {}, "expected these files, or lines in the table"
    assert [name for name, file in files.items() if name not in loaded_by(file)] == []


def test_a_module_with_a_test_file_of_its_own_needs_no_line_in_the_table() -> None:
    assert [name for name in TESTED_IN if own_test(name).exists()] == []


def test_the_table_names_modules() -> None:
    assert sorted(TESTED_IN) == list(TESTED_IN)
    assert [name for name in TESTED_IN if name not in SOURCES] == []
