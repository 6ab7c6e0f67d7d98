"""Lets another process take the device's free memory while a server with a pool of default size runs.

    python -m bench.gpu.product.oom --json build/oom.json

The server must keep running and give correct answers: a step that does not fit is computed in smaller steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from bench.gpu.product.product_server import ProductServer
from bench.gpu.product.random_prompts import Prompt, RandomPrompts
from bench.gpu.product.run_state import device_memory_mib, read_state, update_state, use_triton_cache
from bench.gpu.product.stage_report import StageReport, open_report
from radixkv.service.client import AsyncClient, logits_of
from radixkv.v1.prefill_pb2 import PrefillResponse

_TIMEOUT_S = 60.0
_LISTEN_S, _DRY_LISTEN_S = 22.0, 500.0
_SETTINGS = ("model.exactness=fast", "cache.memory_share=0.9")
_MIN_FREE_SHARE = 0.1  # the share that `cache.memory_share` leaves free
_TOLERATED_SHARE = 0.005  # by which the free share may be smaller

_REMAINING_MIB = 200  # of the device's memory, which the other process does not take
_NUM_PROMPTS, _PROMPT_TOKENS, _DRY_PROMPT_TOKENS = 8, 2048, 128
_TOLERANCE = 0.1  # maximum error of logits in bfloat16, relative to their norm; see bench/gpu_prefill.py
SMALLER_STEP = "no memory for a step"  # a message in the engine's log; `test_product.py` checks that it exists

# The process that takes the device's memory, in ever smaller pieces, and keeps it until stdin ends.
_BALLAST = f"""
import sys, torch
torch.zeros(1, device="cuda")
held, size = [], 1 << 30
while size >= 1 << 21:
    free, _ = torch.cuda.mem_get_info()
    if free - size < {_REMAINING_MIB} << 20:
        size //= 2
        continue
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
print("holding", sum(each.nbytes for each in held) >> 20, "MiB", flush=True)
sys.stdin.read()
"""
_DRY_BALLAST = 'import sys; print("holding nothing", flush=True); sys.stdin.read()'


def main() -> int:
    """Start the server, take the memory, send prompts.

    Returns 1 if an answer is wrong, if the server does not start or ends, or if its pool takes too much memory.
    """
    report = open_report("Take the free memory of the device while a server processes prompts.")
    use_triton_cache()
    return report.finish(asyncio.run(_run(report)))


async def _run(report: StageReport) -> str:
    state = read_state()
    device = "cpu" if report.is_dry_run else "cuda"
    server = ProductServer.launch("oom", state.get("model", "tiny"), _SETTINGS, device=device)
    update_state(servers={server.name: server.facts()})
    try:
        with report.row("a pool as large as the memory allows") as row:
            server = server.wait_until_listening(_DRY_LISTEN_S if report.is_dry_run else _LISTEN_S)
            async with AsyncClient(server.address, timeout_s=_TIMEOUT_S) as client:
                row["pool_blocks"] = (await client.stats()).blocks.total
            memory = device_memory_mib()
            row["text"] = f"{row['pool_blocks']} blocks"
            if memory is not None:
                row["free_share"] = memory["free"] / memory["total"]
                row["is_right"] = row["free_share"] >= _MIN_FREE_SHARE - _TOLERATED_SHARE
                row["text"] += f", {memory['free'] / 1024:.1f} of {memory['total'] / 1024:.1f} GiB free"
        if not row["is_right"] and not server.address:
            return "the server did not start"
        await _ask_without_memory(report, server, state["vocab_size"])
    finally:
        server.stop()
    return "the server kept running, and its answers were correct" if report.is_right else "see the rows"


async def _ask_without_memory(report: StageReport, server: ProductServer, vocab_size: int) -> None:
    """Send prompts while almost no memory is free, then again with free memory, and compare.

    The order matters: the first large step allocates memory that PyTorch keeps, and later steps of its size need none.
    """
    prompts = RandomPrompts(vocab_size, seed=4)
    batch = list(prompts.draw_many(_NUM_PROMPTS, _DRY_PROMPT_TOKENS if report.is_dry_run else _PROMPT_TOKENS))
    without_memory: list[PrefillResponse] = []
    async with AsyncClient(server.address, timeout_s=_TIMEOUT_S) as client:
        with report.row(f"{len(batch)} prompts with {_REMAINING_MIB} MiB left") as row, _ballast(report) as ballast:
            row["ballast"] = ballast
            without_memory += await asyncio.gather(*(_ask(client, prompt) for prompt in batch))
            row["smaller_steps"] = sum(SMALLER_STEP in line for _, line in server.log_lines())
            row["text"] = f"answered, {ballast}, {row['smaller_steps']} steps were made smaller"
        with report.row(f"{len(batch)} prompts with memory") as row:
            with_memory = [await _ask(client, prompt) for prompt in batch]
            errors = [relative_error(*pair) for pair in zip(with_memory, without_memory, strict=True)]
            row |= {"largest_error": max(errors), "is_right": max(errors) <= _TOLERANCE and server.is_running}
            row["text"] = f"largest error without memory {max(errors):.3g}"


async def _ask(client: AsyncClient, prompt: Prompt) -> PrefillResponse:
    return await client.prefill(prompt, return_logits=True, read_cache=False, write_cache=False)


def relative_error(expected: PrefillResponse, got: PrefillResponse) -> float:
    """Return the error of logits relative to their norm; 1 if a logit is not finite."""
    expected_row, got_row = logits_of(expected), logits_of(got)
    error = float(np.linalg.norm(got_row - expected_row) / np.linalg.norm(expected_row))
    return error if np.isfinite(error) else 1.0


@contextlib.contextmanager
def _ballast(report: StageReport) -> Iterator[str]:
    """Run the process that takes the memory. Yields the line that it prints: the amount of memory that it holds."""
    code = _DRY_BALLAST if report.is_dry_run else _BALLAST
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip() or "the ballast process failed"
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    sys.exit(main())
