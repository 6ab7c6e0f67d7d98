"""Checks on server E that neither a cache hit nor other requests in the same batch change a bit of an answer.

python -m bench.gpu.product.bits --json build/bits.json
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu.product.product_server import running_server
from bench.gpu.product.random_prompts import Prompt, RandomPrompts
from bench.gpu.product.run_state import read_state
from bench.gpu.product.stage_report import StageReport, open_report
from radixkv.service.client import AsyncClient
from radixkv.v1.prefill_pb2 import PrefillResponse

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class BitsSizes:
    """Sizes of the comparison.

    Attributes:
        prefixes: numbers of cached tokens, including those just below and above a block's end.
        suffixes: numbers of tokens after the cached ones.
        num_at_once: number of requests in flight at the same time.
        generations: number of greedy generations, each of which runs alone and then together with the others.
        new_tokens: tokens of each generation.
    """

    prefixes: tuple[int, ...]
    suffixes: tuple[int, ...]
    num_at_once: int
    generations: int
    new_tokens: int


_SIZES = BitsSizes(
    prefixes=(0, 1, 63, 64, 65, 700, 2000, 3900),
    suffixes=(1, 17, 64, 300, 2048),
    num_at_once=16,
    generations=16,
    new_tokens=32,
)
_DRY_SIZES = BitsSizes(prefixes=(0, 65, 130), suffixes=(1, 17), num_at_once=6, generations=4, new_tokens=6)
_GENERATION_PROMPT_TOKENS = 100


@dataclass(slots=True)
class BitsCase:
    """One prompt, and its answer without the cache.

    Attributes:
        prompt: token ids.
        prefix_tokens: number of tokens that are cached before the prompt is sent.
        tenant: a tenant of this prompt alone, so that no other prompt shares its cache.
        uncached: the answer without the cache; None before it has arrived.
    """

    prompt: Prompt
    prefix_tokens: int
    tenant: str
    uncached: PrefillResponse | None = None

    def difference(self, warm: PrefillResponse) -> str:
        """Describe how an answer with the cache differs; empty if it does not."""
        assert self.uncached is not None
        if warm.usage.cached_tokens != self.prefix_tokens:
            return f"expected {self.prefix_tokens} cached tokens, got {warm.usage.cached_tokens}"
        return describe_difference(self.uncached, warm)


def describe_difference(expected: PrefillResponse, got: PrefillResponse) -> str:
    """Return the first difference between the logits or the tokens of two answers; empty if there is none."""
    if not expected.logits or len(got.logits) != len(expected.logits):
        return f"expected {len(expected.logits)} bytes of logits, got {len(got.logits)}"
    if got.logits != expected.logits:
        # The bits of float32 logits, compared as integers: NaN would differ from itself, and 0.0 would equal -0.0.
        expected_bits, got_bits = (np.frombuffer(answer.logits, dtype="<u4") for answer in (expected, got))
        return f"logit {int(np.flatnonzero(expected_bits != got_bits)[0])} differs"
    if got.next_token_id != expected.next_token_id:
        return f"expected token {expected.next_token_id}, got {got.next_token_id}"
    return ""


def main() -> int:
    """Compare all cases. Returns 1 if an answer differs, or if the server does not run."""
    report = open_report("Compare answers bit for bit, cold, warm, and next to other requests.")
    sizes = _DRY_SIZES if report.is_dry_run else _SIZES
    summary = asyncio.run(_run(report, sizes))
    return report.finish(summary)


async def _run(report: StageReport, sizes: BitsSizes) -> str:
    with report.row("server") as row:
        server = running_server("E")
        row["text"] = server.address
    if not row["is_right"]:
        return "server E is not running"
    prompts = RandomPrompts(read_state()["vocab_size"], seed=1)
    cases = [
        BitsCase(prompts.draw(prefix + suffix), prefix, f"bits-{index}")
        for index, (suffix, prefix) in enumerate(itertools.product(sizes.suffixes, sizes.prefixes))
    ]
    num_compared, num_different = 0, 0
    async with AsyncClient(server.address, timeout_s=_TIMEOUT_S) as client:
        for start in range(0, len(cases), sizes.num_at_once):
            compared = cases[start : start + sizes.num_at_once]
            repeated = cases[: sizes.num_at_once - len(compared)]
            with report.row(f"prompts {start + 1} to {start + len(compared)}") as row:
                outcomes = await _compare_prompts(client, compared, repeated)
                differences = [outcome for outcome in outcomes if outcome]
                row |= {"compared": len(outcomes), "different": len(differences), "is_right": not differences}
                row["text"] = f"{len(outcomes)} compared, {len(differences)} different"
                if differences:
                    row["text"] += f": {differences[0]}"
                num_compared += len(outcomes)
                num_different += len(differences)
        with report.row(f"{sizes.generations} greedy generations, alone and together") as row:
            different = await _compare_generations(client, prompts, sizes)
            row |= {"compared": sizes.generations, "different": different, "is_right": not different}
            row["text"] = f"{sizes.generations} compared, {different} different"
            num_compared += sizes.generations
            num_different += different
    return f"{num_compared} answers compared bit for bit, {num_different} different"


async def _compare_prompts(client: AsyncClient, cases: Sequence[BitsCase], repeated: Sequence[BitsCase]) -> list[str]:
    """Compare each case after its cached prefix, alone and then together with the others, with its uncached answer.

    Args:
        client: client of the server.
        cases: the cases to compare.
        repeated: further cases in flight, so that there are enough requests; they are not compared.

    Returns:
        A description of the difference for each comparison, empty if there is none: first of each prompt alone, then of
        each prompt together with the others.
    """
    outcomes = []
    for case in cases:
        case.uncached = await client.prefill(
            case.prompt, tenant=case.tenant, return_logits=True, read_cache=False, write_cache=False
        )
        if case.prefix_tokens:
            await client.prefill(case.prompt[: case.prefix_tokens], tenant=case.tenant)
        outcomes.append(case.difference(await _ask(client, case)))
    together = await asyncio.gather(*(_ask(client, case) for case in (*cases, *repeated)))
    outcomes += [case.difference(answer) for case, answer in zip(cases, together[: len(cases)], strict=True)]
    return outcomes


async def _ask(client: AsyncClient, case: BitsCase) -> PrefillResponse:
    # The suffix is not published, so that the next request finds the same prefix.
    return await client.prefill(case.prompt, tenant=case.tenant, return_logits=True, write_cache=False)


async def _compare_generations(client: AsyncClient, prompts: RandomPrompts, sizes: BitsSizes) -> int:
    """Return the number of greedy generations that are too short, or that differ when they run together."""

    async def generate(prompt: Prompt) -> list[int]:
        chunks = client.generate(prompt, max_new_tokens=sizes.new_tokens, ignore_eos=True, tenant="bits-generate")
        return [token async for chunk in chunks for token in chunk.token_ids]

    batch = list(prompts.draw_many(sizes.generations, _GENERATION_PROMPT_TOKENS))
    alone = [await generate(prompt) for prompt in batch]
    together = await asyncio.gather(*(generate(prompt) for prompt in batch))
    return sum(
        len(tokens_alone) != sizes.new_tokens or tokens_alone != tokens_together
        for tokens_alone, tokens_together in zip(alone, together, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
