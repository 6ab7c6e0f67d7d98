"""Mutation check: breaks the project in small ways, and checks that tests fail.

    python -m tests.mutants.mutation_check [--stale] [FILE ...]

Files, such as `cache/tenants.py` or `service/`, select the mutants whose path begins with them; the default is all.
A mutant is a text that occurs exactly once in its file, and its replacement. When the code changes, some mutants no
longer apply: the check lists them first and fails; `--stale` only lists them, in some seconds.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.mutants import (
    ANSWER_MUTANTS,
    AUTHENTICITY_MUTANTS,
    CACHE_MUTANTS,
    DOCTOR_MUTANTS,
    ENGINE_MUTANTS,
    EVALUATION_MUTANTS,
    EVENT_MUTANTS,
    EXPLAIN_MUTANTS,
    FLEET_MUTANTS,
    INTEGRATION_MUTANTS,
    KERNEL_MUTANTS,
    LOADING_MUTANTS,
    OFFLINE_MUTANTS,
    OFFLOAD_MUTANTS,
    PART_MUTANTS,
    ROUTING_MUTANTS,
    SERVICE_MUTANTS,
    STATE_MUTANTS,
    STATEMENT_MUTANTS,
    STORE_MUTANTS,
    TIERS_MUTANTS,
    Mutant,
)

ROOT = Path(__file__).parents[2]
_TESTS_TIMEOUT_S = 120  # for the tests of one mutant
CACHE_TESTS = (
    "tests/cache/test_block_pool.py",
    "tests/test_tokens.py",
    "tests/test_namespace.py",
    "tests/cache/test_node.py",
    "tests/cache/test_radix_tree.py",
    "tests/cache/test_lease.py",
    "tests/cache/test_public_prefixes.py",
    "tests/cache/test_pins.py",
    "tests/cache/test_held_blocks.py",
    "tests/cache/test_eviction_queue.py",
    "tests/cache/test_evictor.py",
    "tests/cache/test_probation.py",
    "tests/cache/test_probation_order.py",
    "tests/cache/test_miss_reason.py",
    "tests/cache/test_evicted_prefixes.py",
    "tests/cache/test_changes.py",
    "tests/cache/test_prefix_cache.py",
    "tests/cache/test_retained_nodes.py",
    "tests/cache/test_purge.py",
    "tests/cache/test_sessions.py",
    "tests/cache/test_namespace_trees.py",
    "tests/cache/test_tenants.py",
    "tests/cache/test_policies.py",
    "tests/cache/test_adaptive_policy.py",
    "tests/cache/test_cache_stress.py",
)
ENGINE_TESTS = (
    "tests/cache/test_lease.py",
    "tests/cache/test_probation.py",
    "tests/engine/test_sampler.py",
    "tests/engine/test_constraints.py",
    "tests/engine/test_call_queue.py",
    "tests/engine/test_inbox.py",
    "tests/engine/test_core.py",
    "tests/scheduling/test_step_plan.py",
    "tests/scheduling/test_lending.py",
    "tests/scheduling/test_scheduler.py",
    "tests/scheduling/test_shares.py",
    "tests/whole/test_generation.py",
    "tests/engine/test_overlap.py",
    "tests/scheduling/test_single_flight.py",
    "tests/engine/adapters/test_adapters.py",
    "tests/engine/test_engine.py",
    "tests/engine/test_watchdog.py",
)
KERNEL_TESTS = (
    "tests/kernels/test_shared_prefix.py",
    "tests/kernels/cpu/test_attention_plan.py",
    "tests/kernels/cpu/test_row_tiles.py",
    "tests/kernels/cpu/test_gemm_trial.py",
    "tests/kernels/cpu/test_stopwatch.py",
    "tests/kernels/cpu/test_attention.py",
    "tests/kernels/native/test_attention_work.py",
    "tests/kernels/native/test_attention.py",
    "tests/kernels/native/test_gemm.py",
    "tests/kernels/native/test_rows.py",
    "tests/kernels/native/test_layer.py",
    "tests/model/layers/test_native_layers.py",
    "tests/kernels/native/test_copies.py",
)
LOADING_TESTS = (
    "tests/config/test_cache_directory.py",
    "tests/kernels/native/test_library.py",
    "tests/model/layers/test_gemm_tuner.py",
    "tests/model/layers/test_fused_attention.py",
    "tests/startup/test_model_check.py",
)
EVENT_TESTS = (
    "tests/events/test_block_identity.py",
    "tests/test_namespace.py",
    "tests/events/test_event_log.py",
    "tests/events/test_tree_feed.py",
    "tests/events/test_store_feed.py",
    "tests/events/test_readers.py",
    "tests/cache/test_cache_stress.py",
)
DOCTOR_TESTS = (
    "tests/explain/test_reordering.py",
    "tests/doctor/test_causes.py",
    "tests/doctor/test_content_index.py",
    "tests/doctor/test_block_examination.py",
    "tests/doctor/test_diagnosis.py",
)
EXPLAIN_TESTS = (
    "tests/cache/test_branches.py",
    "tests/explain",
    "tests/engine/test_look_up.py",
    "tests/service/server/servicers/test_explanations.py",
)
STATEMENT_TESTS = (
    "tests/cache/test_tenant_ledger.py",
    "tests/engine/test_statement_feed.py",
    "tests/offload/test_tenant_use.py",
    "tests/statements",
    "tests/test_durable_file.py",
    "tests/service/cli/test_statement.py",
    "tests/service/server/servicers/test_statements.py",
)
OFFLOAD_TESTS = (
    "tests/offload/index/test_eviction_order.py",
    "tests/offload/index/test_namespace_keys.py",
    "tests/offload/index/test_retention.py",
    "tests/offload/index/test_tier_index.py",
    "tests/offload/index/test_offload_index.py",
    "tests/offload/index/test_node_keys.py",
    "tests/offload/test_prompt_keys.py",
    "tests/offload/test_deleter.py",
    "tests/offload/test_disk_record.py",
    "tests/offload/test_restart_scan.py",
    "tests/offload/test_restart_save.py",
    "tests/offload/test_offload.py",
    "tests/engine/transfer/test_lease_exporter.py",
    "tests/engine/transfer/test_transfer.py",
    "tests/service/server/receive/test_fair_shares.py",
    "tests/service/server/servicers/test_kv_sender.py",
    "tests/offload/test_lookups.py",
    "tests/offload/test_purge_local.py",
    "tests/offload/test_saver.py",
    "tests/offload/test_purge_shared.py",
    "tests/scheduling/test_admission.py",
    "tests/offload/test_load_or_compute.py",
    "tests/offload/test_prefetch.py",
)
ROUTING_TESTS = (
    "tests/routing/test_candidate.py",
    "tests/routing/test_policies.py",
    "tests/routing/test_block_index.py",
    "tests/routing/test_event_cursor.py",
    "tests/routing/test_fleet_load.py",
    "tests/routing/test_prompt_blocks.py",
    "tests/routing/test_fleet_view.py",
    "tests/routing/test_router.py",
)
ANSWER_TESTS = (
    "tests/api/test_logprob_table.py",
    "tests/engine/test_sampler.py",
    "tests/service/server/receive/test_response_bytes.py",
    "tests/service/server/servicers/test_token_stream.py",
    "tests/service/server/servicers/test_stop_strings.py",
    "tests/service/server/servicers/test_generate.py",
    "tests/service/server/gateway/test_servicer.py",
    "tests/service/structured/test_grammar_cache.py",
    "tests/service/structured/test_compilation.py",
    "tests/service/structured/test_grammars.py",
)
STATE_TESTS = (
    "tests/cache/test_recurrent_states.py",
    "tests/model/states/test_state_step.py",
    "tests/engine/test_recurrent_states.py",
)
PART_TESTS = (
    "tests/cache/test_part_memory.py",
    "tests/cache/test_window_pool.py",
    "tests/cache/test_windowed_layers.py",
    "tests/offload/index/test_tier_index.py",
    "tests/offload/index/test_offload_index.py",
    "tests/offload/test_block_mover.py",
    "tests/offload/test_loader.py",
    "tests/offload/test_saver.py",
)
STORE_TESTS = (
    "tests/offload/test_block_mover.py",
    "tests/offload/tiers/test_block_object.py",
    "tests/offload/tiers/test_namespace_file.py",
    "tests/offload/tiers/test_tier.py",
    "tests/offload/tiers/test_disk.py",
    "tests/startup/test_tiers.py",
)
AUTHENTICITY_TESTS = (
    "tests/offload/tiers/test_block_object.py",
    "tests/offload/tiers/test_block_mac.py",
    "tests/offload/tiers/test_rejected_blocks.py",
    "tests/offload/tiers/test_private_directory.py",
    "tests/engine/transfer",
    "tests/startup/test_requirements.py",
    "tests/service/server/servicers/test_kv_sender.py",
)
FLEET_TESTS = (
    "tests/service/fleet/test_replica.py",
    "tests/service/fleet/test_replica_connection.py",
)
SERVICE_TESTS = (
    "tests/service/client/test_client.py",
    "tests/service/server/servicers/test_segments.py",
    "tests/service/server/servicers/test_stream_turns.py",
    "tests/service/http/test_prompts.py",
    "tests/service/server/servicers/test_kv_sources.py",
    "tests/service/server/receive/test_receiver.py",
    "tests/service/server/page/test_state_feed.py",
    "tests/service/server/test_metrics_port.py",
    "tests/service/server/test_connections.py",
)
OFFLINE_TESTS = ("tests/service/text/test_answer_text.py", "tests/service/offline", "tests/whole/test_llm.py")
INTEGRATION_TESTS = (
    "tests/integrations/test_transformers_tiers.py",
    "tests/integrations/test_transformers_cache.py",
)
TIERS_TESTS = (
    "tests/integrations/tiers/test_rank_index.py",
    "tests/integrations/tiers/test_kv_layers.py",
    "tests/integrations/tiers/test_sized_stores.py",
    "tests/integrations/tiers/test_byte_store.py",
    "tests/integrations/tiers/test_vllm_connector.py",
    "tests/integrations/tiers/test_lmcache_adapter.py",
    "tests/integrations/tiers/test_sglang_storage.py",
)
EVALUATION_TESTS = ("tests/integrations/test_evaluation.py",)
# Groups of mutants, each with the tests that must fail for every one of them.
CHECKS = (
    (CACHE_MUTANTS, CACHE_TESTS),
    (ENGINE_MUTANTS, ENGINE_TESTS),
    (KERNEL_MUTANTS, KERNEL_TESTS),
    (EVENT_MUTANTS, EVENT_TESTS),
    (EXPLAIN_MUTANTS, EXPLAIN_TESTS),
    (STATEMENT_MUTANTS, STATEMENT_TESTS),
    (DOCTOR_MUTANTS, DOCTOR_TESTS),
    (LOADING_MUTANTS, LOADING_TESTS),
    (OFFLOAD_MUTANTS, OFFLOAD_TESTS),
    (ROUTING_MUTANTS, ROUTING_TESTS),
    (ANSWER_MUTANTS, ANSWER_TESTS),
    (STATE_MUTANTS, STATE_TESTS),
    (PART_MUTANTS, PART_TESTS),
    (STORE_MUTANTS, STORE_TESTS),
    (AUTHENTICITY_MUTANTS, AUTHENTICITY_TESTS),
    (FLEET_MUTANTS, FLEET_TESTS),
    (SERVICE_MUTANTS, SERVICE_TESTS),
    (OFFLINE_MUTANTS, OFFLINE_TESTS),
    (INTEGRATION_MUTANTS, INTEGRATION_TESTS),
    (EVALUATION_MUTANTS, EVALUATION_TESTS),
    (TIERS_MUTANTS, TIERS_TESTS),
)


def path_of(mutant: Mutant) -> Path:
    return ROOT / "radixkv" / mutant.file


def why_stale(mutant: Mutant) -> str | None:
    """Return why a mutant no longer applies to the sources, or None if it does."""
    path = path_of(mutant)
    if not path.exists():
        return "the file does not exist"
    if mutant.replacement == mutant.text:
        return "the replacement changes nothing"
    source = path.read_text(encoding="utf-8")
    if (count := source.count(mutant.text)) != 1:
        return f"expected the text exactly once, got {count} times"
    if path.suffix == ".py":
        try:
            ast.parse(source.replace(mutant.text, mutant.replacement))
        except SyntaxError as error:
            return f"the file with the replacement is not valid Python: {error.msg}"
    return None


def run_mutant(mutant: Mutant, tests: tuple[str, ...]) -> bool:
    """Run the tests on a copy of the project with this mutant in it.

    Returns:
        Whether the mutant is caught: the tests fail, or do not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("radixkv", "tests", "bench"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "radixkv" / mutant.file
        source = path.read_text(encoding="utf-8")
        path.write_text(source.replace(mutant.text, mutant.replacement), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            result = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=_TESTS_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:  # an endless loop, or a machine that is too busy
            print(f"the tests did not end within {_TESTS_TIMEOUT_S} s: ", end="")
            return True
        return result.returncode == 1  # tests ran and failed; any other failure is a mistake of the check itself


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants. Returns 1 if one survives or no longer applies, or if the files have none."""
    parser = argparse.ArgumentParser(description="Break the code in small ways; tests must notice.")
    parser.add_argument("--stale", action="store_true", help="only list the mutants that no longer apply")
    parser.add_argument("files", nargs="*", metavar="FILE", help="beginnings of the files to break; default all")
    parsed = parser.parse_args(arguments)
    prefixes = tuple(parsed.files or [""])  # all files begin with the empty prefix
    num_stale = 0
    for mutants, tests in CHECKS:
        for mutant in (each for each in mutants if each.file.startswith(prefixes)):
            if reason := why_stale(mutant):
                num_stale += 1
                print(f"STALE    {mutant.file}: {reason}: {mutant.text.strip()}", flush=True)
        for test in (each for each in tests if not (ROOT / each).exists()):
            num_stale += 1
            print(f"STALE    {test}: the file of tests does not exist", flush=True)
    if parsed.stale:
        return 1 if num_stale else 0
    num_survivors = num_mutants = 0
    for mutants, tests in CHECKS:
        for mutant in (each for each in mutants if each.file.startswith(prefixes) and not why_stale(each)):
            is_caught = run_mutant(mutant, tests)
            num_survivors += not is_caught
            num_mutants += 1
            print(f"{'caught  ' if is_caught else 'SURVIVED'} {mutant.file}: {mutant.text.strip()}", flush=True)
    print(f"{num_mutants - num_survivors} of {num_mutants} mutants caught")
    return 1 if num_survivors or num_stale or not num_mutants else 0


if __name__ == "__main__":
    sys.exit(main())
