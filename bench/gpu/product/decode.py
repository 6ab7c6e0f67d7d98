"""Times decoding on servers F and E, by the number of requests that share a prefix.

python -m bench.gpu.product.decode --json build/decode.json
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.gpu.product.product_server import running_server
from bench.gpu.product.random_prompts import Prompt, RandomPrompts
from bench.gpu.product.run_state import read_state
from bench.gpu.product.stage_report import StageReport, open_report
from radixkv.service.client import AsyncClient

_TIMEOUT_S = 120.0
_TENANT = "decode"


@dataclass(frozen=True, slots=True)
class DecodeSizes:
    """Sizes of the generations.

    Attributes:
        shared_tokens: tokens of the prefix that requests share.
        own_tokens: tokens of each of these requests after the prefix.
        sharers: numbers of requests that share the prefix, ascending.
        unshared: number of requests that share nothing.
        unshared_tokens: prompt tokens of each of these requests. With their new tokens, all of them fit into the pool
            of server E.
        new_tokens: tokens that each request generates.
    """

    shared_tokens: int
    own_tokens: int
    sharers: tuple[int, ...]
    unshared: int
    unshared_tokens: int
    new_tokens: int


_SIZES = DecodeSizes(
    shared_tokens=4096, own_tokens=16, sharers=(1, 16, 64), unshared=16, unshared_tokens=3584, new_tokens=64
)
_DRY_SIZES = DecodeSizes(
    shared_tokens=192, own_tokens=16, sharers=(1, 4), unshared=4, unshared_tokens=128, new_tokens=8
)


@dataclass(frozen=True, slots=True)
class TimedGeneration:
    """Tokens of one completion, and the arrival times of its messages in seconds."""

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]


def main() -> int:
    """Measure both servers. Returns 1 if a request failed, or if its tokens on server E depend on its batch."""
    report = open_report("Time decoding by the number of requests that share a prefix.")
    return report.finish(asyncio.run(_run(report, _DRY_SIZES if report.is_dry_run else _SIZES)))


async def _run(report: StageReport, sizes: DecodeSizes) -> str:
    state = read_state()
    # Bytes divided by GB/s are nanoseconds.
    weights_ms = state["weight_bytes"] / state["rates"]["device_gb_per_s"] / 1e6
    prompts = RandomPrompts(state["vocab_size"], seed=3)
    shared = prompts.draw(sizes.shared_tokens)
    sharing_prompts = [np.concatenate((shared, own)) for own in prompts.draw_many(max(sizes.sharers), sizes.own_tokens)]
    unshared_prompts = list(prompts.draw_many(sizes.unshared, sizes.unshared_tokens))
    summary = []
    for name in ("F", "E"):
        first_answers: dict[bytes, tuple[int, ...]] = {}
        groups = [(f"{count} sharers of {sizes.shared_tokens}", sharing_prompts[:count]) for count in sizes.sharers]
        groups.append((f"{sizes.unshared} with {sizes.unshared_tokens} tokens each", unshared_prompts))
        for label, group in groups:
            with report.row(f"{name}, {label}") as row:
                async with AsyncClient(running_server(name).address, timeout_s=_TIMEOUT_S) as client:
                    for prompt in group:  # so that decoding is measured, not prefill
                        await client.prefill(prompt, tenant=_TENANT)
                    answers = await asyncio.gather(*(_generate(client, prompt, sizes.new_tokens) for prompt in group))
                row |= summarize(answers, weights_ms)
                row["different"] = count_different(first_answers, group, answers)
                is_complete = all(len(answer.tokens) == sizes.new_tokens for answer in answers)
                row["is_right"] = is_complete and not (name == "E" and row["different"])
                row["text"] = (
                    f"{row['tokens_per_s']:.0f} tokens/s, {row['step_ms']:.2f} ms per step, "
                    f"{row['weights_ratio']:.2f} times the time to read the weights, {row['different']} differ by batch"
                )
                if label.startswith(f"{max(sizes.sharers)} sharers"):
                    summary.append(f"{name} {label}: {row['step_ms']:.1f} ms, {row['weights_ratio']:.1f}x weights")
    return "; ".join(summary)


async def _generate(client: AsyncClient, prompt: Prompt, new_tokens: int) -> TimedGeneration:
    tokens: list[int] = []
    times_s = []
    async for chunk in client.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True, tenant=_TENANT):
        tokens += chunk.token_ids
        times_s.append(time.monotonic())
    return TimedGeneration(tuple(tokens), tuple(times_s))


def summarize(answers: list[TimedGeneration], weights_ms: float) -> dict[str, Any]:
    """Return the speed of generations that ran together: `tokens_per_s`, `step_ms` and `weights_ratio`.

    Args:
        answers: completions of at least two tokens each.
        weights_ms: time to read all weights once.
    """
    first_s = min(answer.times_s[0] for answer in answers)
    last_s = max(answer.times_s[-1] for answer in answers)
    step_ms = statistics.median(
        (answer.times_s[-1] - answer.times_s[0]) / (len(answer.tokens) - 1) * 1e3 for answer in answers
    )
    return {
        "tokens_per_s": sum(len(answer.tokens) for answer in answers) / max(last_s - first_s, 1e-6),
        "step_ms": step_ms,
        "weights_ratio": step_ms / weights_ms,
    }


def count_different(
    first_answers: dict[bytes, tuple[int, ...]], group: list[Prompt], answers: list[TimedGeneration]
) -> int:
    """Count the answers that differ from the first answer to the same prompt.

    Args:
        first_answers: tokens of the first answer to each prompt; the answers to new prompts are added.
        group: the prompts.
        answers: the answer to each of them.
    """
    num_different = 0
    for prompt, answer in zip(group, answers, strict=True):
        first_answer = first_answers.setdefault(prompt.tobytes(), answer.tokens)
        num_different += answer.tokens != first_answer
    return num_different


if __name__ == "__main__":
    sys.exit(main())
