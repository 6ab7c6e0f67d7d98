"""Measures what `LLM` costs on top of the engine that it runs.

    python -m bench.llm_overhead [--model DIR] [--json FILE]

In turn, the same number of prompts of the same length is passed to `LLM.generate`, and directly to the engine inside
it, all at once. The direct calls collect tokens as `LLM` does, but make no outputs and decode no text. In each round,
each of the two gets new random prompts that share their first third. The ratios of the times of the rounds are
summarized by their median, and by quartiles, which show the noise.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.parts.result_file import write_result
from radixkv import LLM, SamplingParams
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens
from radixkv.api.sampling import Sampling
from radixkv.service.cli.argument_types import positive

_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="as `model.path`")
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--prompt-tokens", type=positive, default=192)
    parser.add_argument("--new-tokens", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    rng = random.Random(args.seed)
    with LLM(args.model) as llm:
        engine = llm._engine
        assert engine is not None
        vocab_size = engine.limits.vocab_size

        def draw_prompts() -> list[list[int]]:
            shared = [rng.randrange(vocab_size) for _ in range(args.prompt_tokens // 3)]
            num_own = args.prompt_tokens - len(shared)
            return [[*shared, *(rng.randrange(vocab_size) for _ in range(num_own))] for _ in range(args.prompts)]

        def run_llm(prompts: list[list[int]]) -> None:
            params = SamplingParams(max_tokens=args.new_tokens, temperature=0.0, ignore_eos=True)
            llm.generate(prompts, params, use_tqdm=False)

        def run_engine(prompts: list[list[int]]) -> None:
            sampling = Sampling(args.new_tokens, ignore_eos=True)
            futures = []
            for prompt in prompts:
                token_ids: list[int] = []

                def add(new: GeneratedTokens, token_ids: list[int] = token_ids) -> None:
                    token_ids.extend(new.token_ids)

                futures.append(engine.generate(PrefillParams(np.array(prompt, "<u4").tobytes()), sampling, add))
            for future in futures:
                future.result(_TIMEOUT_S)

        ratios: list[float] = []
        seconds: dict[str, list[float]] = {"llm": [], "engine": []}
        for number in range(args.rounds + 1):
            took_s = {}
            in_random_order = rng.sample([("llm", run_llm), ("engine", run_engine)], 2)
            for name, run in in_random_order:
                prompts = draw_prompts()
                start_s = time.perf_counter()
                run(prompts)
                took_s[name] = time.perf_counter() - start_s
            if number:  # the first round warms up
                ratios.append(took_s["llm"] / took_s["engine"])
                for name, each_s in took_s.items():
                    seconds[name].append(each_s)
    # Exclusive quartiles, like those of `statistics.quantiles`, which needs two values before Python 3.13.
    low, middle, high = np.percentile(ratios, (25, 50, 75), method="weibull").tolist()
    ratio_of_sums = sum(seconds["llm"]) / sum(seconds["engine"])
    print(f"LLM / engine: median {middle:.4f}, quartiles {low:.4f} to {high:.4f}, of all rounds {ratio_of_sums:.4f}")
    figures = {"median": middle, "quartiles": [low, high], "of_all_rounds": ratio_of_sums, "ratios": ratios}
    write_result(args.json, "bench.llm_overhead", arguments, {"seed": args.seed, **figures})


if __name__ == "__main__":
    main()
