"""Measures how much finding the causes of misses slows a server down, for prompts that miss and prompts that hit.

    python -m bench.diagnosis_cost [--json FILE]

Three engines get the same prompts in random order: two that examine no miss, and one with the default
`server.diagnosed_share`. Each prompt begins with random tokens and continues with one of a few long texts, so it
misses, and the profiler finds the cause if its share of the CPU time suffices. Then the same prompt with a few more
tokens is sent, which is a hit. The next engine gets the prompt when the profiler of the previous engine is idle; CPU
time is counted until then.
Each time is divided by the geometric mean of the times of the two engines that examine no miss for the same prompt, and
the middle half of these ratios is averaged. For the second of these two engines, the ratio to the first is shown: its
distance from 1 is the measurement error. The share of the profiler's own thread in the CPU time is measured without
such an error.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from bench.parts.paired_times import PromptTimes, middle_ratios
from bench.parts.result_file import write_result
from bench.parts.running_engine import running_engine
from radixkv.api.params import PrefillParams
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.service.cli.argument_types import positive

_OFF, _AGAIN, _ON = "off", "off again", "on"  # the engines, by whether they find the causes of misses
_DEFAULT_SHARE = Config().server.diagnosed_share
_NUM_TEXTS = 4
_HEAD_TOKENS, _TAIL_TOKENS = 8, 32  # before the text, and after it in the prompt that hits
_TIMEOUT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="as `model.path`")
    parser.add_argument("--prompts", type=positive, default=200)
    parser.add_argument("--prompt-tokens", type=positive, default=1536)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    rng = np.random.default_rng(args.seed)
    times: dict[str, dict[str, list[PromptTimes]]] = {kind: {_OFF: [], _AGAIN: [], _ON: []} for kind in ("miss", "hit")}
    with ExitStack() as stack:
        settings = ["model.device=cpu", f"model.path={args.model}"]
        settings.append(f"cache.capacity_tokens={2 * args.prompts * args.prompt_tokens}")
        engines = {}
        for name in (_OFF, _AGAIN, _ON):
            diagnosed_share = _DEFAULT_SHARE if name == _ON else 0.0
            engine = running_engine([*settings, f"server.diagnosed_share={diagnosed_share}"])
            engines[name] = stack.enter_context(engine)
        vocab_size = engines[_ON].limits.vocab_size
        texts = [rng.integers(0, vocab_size, args.prompt_tokens) for _ in range(_NUM_TEXTS)]
        for number in range(args.prompts):
            head, tail = (rng.integers(0, vocab_size, size) for size in (_HEAD_TOKENS, _TAIL_TOKENS))
            prompt = np.concatenate((head, texts[number % _NUM_TEXTS]))
            for kind, tokens in (("miss", prompt), ("hit", np.concatenate((prompt, tail)))):
                for name in rng.permutation(list(engines)).tolist():
                    times[kind][name].append(_prefill(engines[name], tokens.astype("<u4").tobytes()))
        misses = engines[_ON].misses
        assert misses is not None
        counts = misses.report(None, 1).counts
        profiler_thread = next(each for each in threading.enumerate() if each.name == "radixkv-misses")
        assert profiler_thread.ident is not None
        profiler_cpu_s = time.clock_gettime(time.pthread_getcpuclockid(profiler_thread.ident))
    profiler_share = profiler_cpu_s / sum(each.processor_s for by_engine in times.values() for each in by_engine[_ON])
    rows = [_row(kind, name, by_engine) for kind, by_engine in times.items() for name in by_engine]
    print(
        f"{counts.examined_misses} of {counts.misses} misses were examined, on a thread that took "
        f"{100 * profiler_share:.2f} % of the CPU time of all prompts"
    )
    for row in rows:
        print(
            f"{row['kind']:5} {row['engine']:10} {row['ttft_ms']:8.1f} ms  TTFT {row['ttft_ratio']:.4f}  "
            f"CPU time {row['processor_ratio']:.4f}, of all prompts {row['processor_ratio_of_sums']:.4f}"
        )
    examined = {"misses": counts.misses, "examined_misses": counts.examined_misses, "thread_share": profiler_share}
    write_result(args.json, "bench.diagnosis_cost", arguments, {"seed": args.seed, **examined, "rows": rows})


def _prefill(engine: Engine, tokens: bytes) -> PromptTimes:
    start_s, start_processor_s = time.perf_counter(), time.process_time()
    engine.prefill(PrefillParams(tokens)).result(_TIMEOUT_S)
    wall_s = time.perf_counter() - start_s
    while engine.misses is not None and engine.misses.is_busy:
        time.sleep(0.001)
    return PromptTimes(wall_s, time.process_time() - start_processor_s)


def _row(kind: str, name: str, times: dict[str, list[PromptTimes]]) -> dict[str, float | str]:
    first, again, own = (np.array(times[each]) for each in (_OFF, _AGAIN, name))  # [num_prompts, 2]
    ttft_ratio, processor_ratio = middle_ratios(name, times, (_OFF, _AGAIN)).tolist()
    # `middle_ratios` ignores the slowest quarter, to which examined prompts may belong. The sums include all prompts.
    ratio_of_sums = own.sum(axis=0) / np.sqrt(first.sum(axis=0) * again.sum(axis=0))
    return {
        "kind": kind,
        "engine": name,
        "ttft_ms": 1e3 * float(np.median(own[:, 0])),
        "ttft_ratio": ttft_ratio,
        "processor_ratio": processor_ratio,
        "ttft_ratio_of_sums": float(ratio_of_sums[0]),
        "processor_ratio_of_sums": float(ratio_of_sums[1]),
    }


if __name__ == "__main__":
    main()
