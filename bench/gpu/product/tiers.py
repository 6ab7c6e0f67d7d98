"""Fills the pool of server E until blocks are evicted to host memory and to disk, and loads them back.

python -m bench.gpu.product.tiers --json build/tiers.json
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from bench.gpu.product.bits import describe_difference
from bench.gpu.product.product_server import running_server
from bench.gpu.product.random_prompts import Prompt, RandomPrompts
from bench.gpu.product.run_state import read_state
from bench.gpu.product.stage_report import StageReport, open_report
from radixkv.service.client import AsyncClient
from radixkv.v1.cache_pb2 import StatsResponse, TierStats
from radixkv.v1.prefill_pb2 import PrefillResponse

_TIMEOUT_S = 120.0
_TENANT = "tiers"
_MAX_IN_FLIGHT = 2

# The goal: loading reaches this share of the rate of copies from pinned memory.
_GOAL_SHARE_OF_PINNED = 0.5


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes of the stage.

    Attributes:
        prompt_tokens: tokens of each prompt.
        to_host: number of prompts that fill the pool twice over.
        to_disk: number of prompts, including these, after which the host tier has evicted some blocks to disk.
        loaded: number of prompts to load from each tier.
        max_sent: maximum number of prompts that are sent again in order to load `loaded` prompts from a tier.
    """

    prompt_tokens: int
    to_host: int
    to_disk: int
    loaded: int
    max_sent: int


_SIZES = TierSizes(prompt_tokens=4096, to_host=32, to_disk=48, loaded=3, max_sent=12)
_DRY_SIZES = TierSizes(prompt_tokens=192, to_host=22, to_disk=44, loaded=2, max_sent=12)


@dataclass(slots=True)
class TimedAnswer:
    """A response and the seconds until it arrived."""

    answer: PrefillResponse
    seconds: float


class TierTraffic:
    """Prompts that were prefilled once, and their first answers.

    Args:
        client: client of server E.
        prompts: draws the prompts.
        sizes: sizes of the stage.
    """

    def __init__(self, client: AsyncClient, prompts: RandomPrompts, sizes: TierSizes) -> None:
        self._client = client
        self._prompts = prompts
        self._sizes = sizes
        self._answered: list[tuple[Prompt, TimedAnswer]] = []

    @property
    def recompute_s(self) -> float:
        """Median seconds until a prompt that was not cached was answered."""
        return statistics.median(original.seconds for _, original in self._answered)

    async def fill(self, count: int) -> dict[str, float]:
        """Prefill new prompts until there are `count` in total. Returns the seconds, and the rate of saving in GB/s."""
        before = await self._client.stats()
        start_s = time.monotonic()
        slots = asyncio.Semaphore(_MAX_IN_FLIGHT)

        async def prefill_one(prompt: Prompt) -> None:
            async with slots:
                self._answered.append((prompt, await self.ask(prompt)))

        new_prompts = self._prompts.draw_many(count - len(self._answered), self._sizes.prompt_tokens)
        await asyncio.gather(*(prefill_one(prompt) for prompt in new_prompts))
        elapsed_s = time.monotonic() - start_s
        after = await self._client.stats()
        saved_before = sum(tier.saved_blocks for tier in before.tiers)
        saved_blocks = sum(tier.saved_blocks for tier in after.tiers) - saved_before
        return {"seconds": elapsed_s, "saved_gb_per_s": saved_blocks * after.block_bytes / elapsed_s / 1e9}

    async def ask(self, prompt: Prompt) -> TimedAnswer:
        """Prefill one prompt and time the answer."""
        start_s = time.monotonic()
        answer = await self._client.prefill(prompt, tenant=_TENANT, return_logits=True)
        return TimedAnswer(answer, time.monotonic() - start_s)

    async def load_from(self, tier: str) -> dict[str, Any]:
        """Send the oldest prompts again until enough of them were loaded from a tier.

        Returns:
            The number of prompts that were sent and that were loaded; the blocks that were computed instead; the first
            difference between answers, None if there is none; and, if prompts were loaded, the times of responses whose
            prefix was loaded, was on the device, or was recomputed, and the rate of loading.
        """
        before = await self._client.stats()
        loads: list[TimedAnswer] = []
        hits: list[TimedAnswer] = []
        num_asked, first_difference = 0, ""
        tier_tokens = f"{tier}_tokens"  # the field of `usage` with the tokens that were loaded from the tier
        for prompt, original in self._answered[: self._sizes.max_sent]:
            repeated = await self.ask(prompt)
            num_asked += 1
            first_difference = first_difference or describe_difference(original.answer, repeated.answer)
            if not getattr(repeated.answer.usage, tier_tokens):
                continue
            loads.append(repeated)
            hit = await self.ask(prompt)  # the prompt is on the device now
            hits.append(hit)
            first_difference = first_difference or describe_difference(original.answer, hit.answer)
            if len(loads) == self._sizes.loaded:
                break
        after = await self._client.stats()
        computed_blocks = tier_stats(after, tier).computed_blocks - tier_stats(before, tier).computed_blocks
        row: dict[str, Any] = {
            "asked": num_asked,
            "loaded": len(loads),
            "computed_blocks": computed_blocks,
            "first_difference": first_difference or None,
        }
        if loads:
            loaded_s = statistics.median(each.seconds for each in loads)
            hit_s = statistics.median(each.seconds for each in hits)
            loaded_tokens = statistics.median(getattr(each.answer.usage, tier_tokens) for each in loads)
            num_bytes = loaded_tokens * after.block_bytes / after.block_size
            row |= {
                "loaded_ms": loaded_s * 1e3,
                "device_hit_ms": hit_s * 1e3,
                "recomputed_ms": self.recompute_s * 1e3,
                "load_gb_per_s": num_bytes / max(loaded_s - hit_s, 1e-6) / 1e9,
            }
        return row


def tier_stats(stats: StatsResponse, tier: str) -> TierStats:
    """Return the counters of a tier; zeros if the server has none of this name."""
    return next((each for each in stats.tiers if each.tier == tier), TierStats(tier=tier))


def main() -> int:
    """Fill and load both tiers. Returns 1 if an answer differs, or if a tier has none of the evicted blocks."""
    report = open_report("Load evicted blocks from host memory and from disk.")
    return report.finish(asyncio.run(_run(report, _DRY_SIZES if report.is_dry_run else _SIZES)))


async def _run(report: StageReport, sizes: TierSizes) -> str:
    with report.row("server") as row:
        server = running_server("E")
        row["text"] = server.address
    if not row["is_right"]:
        return "server E is not running"
    state = read_state()
    pinned_gb_per_s = state["rates"]["to_device_pinned_gb_per_s"]
    summary = []
    async with AsyncClient(server.address, timeout_s=_TIMEOUT_S) as client:
        traffic = TierTraffic(client, RandomPrompts(state["vocab_size"], seed=2), sizes)
        for tier, num_prompts in (("host", sizes.to_host), ("disk", sizes.to_disk)):
            with report.row(f"{tier}: fill with {num_prompts} prompts of {sizes.prompt_tokens}") as row:
                row |= await traffic.fill(num_prompts)
                row["text"] = f"{row['seconds']:.1f} s, saved {row['saved_gb_per_s']:.3g} GB/s"
            with report.row(f"{tier}: load") as row:
                row |= await traffic.load_from(tier)
                judge_loads(row)
                if row["loaded"]:
                    share = row["load_gb_per_s"] / pinned_gb_per_s
                    row["share_of_pinned"] = share
                    if tier == "host":
                        row["is_goal_met"] = report.goal(share >= _GOAL_SHARE_OF_PINNED)
                    row["text"] += (
                        f"; {row['load_gb_per_s']:.3g} GB/s, {share:.2f} of pinned copies; TTFT loaded "
                        f"{row['loaded_ms']:.1f} ms, recomputed {row['recomputed_ms']:.1f}, on the device "
                        f"{row['device_hit_ms']:.1f}"
                    )
                    summary.append(f"{tier} {row['load_gb_per_s']:.3g} GB/s ({share:.2f} of pinned)")
    return "; ".join(summary) or "nothing was loaded"


def judge_loads(row: dict[str, Any]) -> None:
    """Set `is_right` of a row of loads: no bit differs, and blocks were loaded, or computed because that was faster."""
    row["text"] = f"{row['loaded']} of {row['asked']} prompts loaded, {row['computed_blocks']} blocks computed instead"
    if row["first_difference"]:
        row |= {"is_right": False, "reason": f"a loaded answer differs: {row['first_difference']}"}
    elif not row["loaded"] and not row["computed_blocks"]:
        row |= {"is_right": False, "reason": f"none of {row['asked']} evicted prompts was in the tier"}


if __name__ == "__main__":
    sys.exit(main())
