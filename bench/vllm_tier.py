"""Runs vLLM on a CPU with the KV connector of radixkv: hits after a restart, and after kills in the middle of saves.

    python -m bench.vllm_tier --json bench/results/vllm_tier.json        # or: make vllm-tier

1. Each prompt is answered twice. The second answer reuses what vLLM's own prefix cache has.
2. vLLM restarts with an empty cache. Each prompt is answered again, and reuses what the disk tier has. It should reuse
   as many tokens as in step 1, and must return the same tokens with the same bits of their log probabilities. Then all
   prompts are answered at once with few blocks, in three runs: with a working disk, one that loses values, and one that
   fails.
3. vLLM is killed with SIGKILL at random times while it saves blocks, again and again. After each restart, prompts whose
   blocks were saved before are answered again, and must have the same answers. At the end, a vLLM without a tier
   computes up to 200 of these answers again, as a reference.
4. As a control, one token of each of up to 100 prompts is changed. If this did not change the answers, wrong K/V would
   not either.

The exit status is 1 if an answer is different or wrong.

vLLM's CPU build is installed from PyPI into a virtual environment of its own, once; `--python` uses another one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.parts.peers.environments import RECIPES, Environments, Recipe
from bench.parts.result_file import write_result
from radixkv.config.cache_directory import cache_directory

_ROOT = Path(__file__).parents[1]
_DISK_BYTES = 8 << 30
_KILL_DISK_BYTES = 1 << 30
_MAX_KILL_DELAY_S = 0.4
_VERIFIED_PROMPTS = 12
_NEWEST_PROMPTS = 6  # of the verified ones; the others are chosen at random
_REUSABLE_TOKENS = 1472  # the whole blocks of a long prompt, whose last token is always computed
_QUESTIONS_PER_DOCUMENT = 10  # as in `bench.parts.vllm_tier_worker`
_FEW_BLOCKS = 100  # so few that running requests are preempted
_LOST_READ_SHARE = 0.2
_MAX_RECOMPUTED = 200
_MAX_CONTROL_PROMPTS = 100
_VLLM = RECIPES["vllm"]
_RECIPE = Recipe(
    (*_VLLM.requirements, "xxhash==4.1.0", "sortedcontainers==2.4.0", "cryptography"), _VLLM.removed, _VLLM.renamed
)

Answer = dict[str, Any]


class Worker:
    """A process that runs `bench.parts.vllm_tier_worker`.

    Args:
        python: an interpreter whose environment has vLLM.
        environment: environment variables with which the process finds radixkv.
        log: file for what vLLM prints.
    """

    def __init__(self, python: Path, environment: dict[str, str], log: Path) -> None:
        read, write = os.pipe()
        self._answers = os.fdopen(read, encoding="utf-8")
        command = [str(python), "-m", "bench.parts.vllm_tier_worker", "--answers", str(write)]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                env=environment,
                pass_fds=(write,),
            )
        os.close(write)

    def start(self, task: dict[str, Any]) -> int:
        """Start a task. Returns the id of the process that the worker forks for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return int(self._read_line()["process_id"])

    def answers(self) -> Iterator[Answer]:
        """Iterate over the lines of the running task until its process ends."""
        while "ended" not in (answer := self._read_line()):
            yield answer

    def run(self, task: dict[str, Any]) -> list[Answer]:
        """Run a task to its end. Returns its answers; the last one has its counts."""
        self.start(task)
        return [each for each in self.answers() if "prompt" in each or "counts" in each]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read_line(self) -> Answer:
        line = self._answers.readline()
        if not line:
            raise SystemExit("the worker ended unexpectedly; its log has the reason")
        answer: Answer = json.loads(line)
        return answer


def measure_restart(worker: Worker, model: Path, folder: Path, num_prompts: int) -> dict[str, Any]:
    """Compare hits in vLLM's own cache with hits in the disk tier after a restart."""
    tier = {"disk_path": str(folder), "disk_bytes": _DISK_BYTES}
    task = {"model": str(model), "tier": tier, "prompts": list(range(num_prompts))}
    *twice, counts = worker.run({**task, "times": 2})
    first, second = twice[::2], twice[1::2]  # the first and the second answer to each prompt
    *after_restart, counts_after_restart = worker.run(task)
    *without_tier, _ = worker.run({**task, "tier": None})
    at_once = {**task, "is_batch": True, "num_blocks": _FEW_BLOCKS}
    *batch, _ = worker.run(at_once)
    *lossy, _ = worker.run({**at_once, "lost": _LOST_READ_SHARE})
    *without_disk, _ = worker.run({**at_once, "lost": 1.0})
    control_prompts = list(range(min(_MAX_CONTROL_PROMPTS, num_prompts)))
    *changed, _ = worker.run({**task, "tier": None, "changed": 0, "prompts": control_prompts})
    num_changed = _num_different(changed, without_tier[: len(changed)], "tokens")
    return {
        "prompts": num_prompts,
        "prompt_tokens_cached_by_vllm": _sum(second, "cached"),
        "prompt_tokens_cached_after_restart": _sum(after_restart, "cached"),
        "prompts_with_fewer_cached_tokens": sum(
            restarted["cached"] < before["cached"] for restarted, before in zip(after_restart, second, strict=True)
        ),
        "different_tokens_after_restart": _num_different(after_restart, second, "tokens"),
        "different_logprobs_after_restart": _num_different(after_restart, second, "logprobs"),
        "different_tokens_without_tier": _num_different(first, without_tier, "tokens"),
        "different_logprobs_without_tier": _num_different(first, without_tier, "logprobs"),
        "all_at_once": {
            "blocks_of_vllm": _FEW_BLOCKS,
            "different_tokens": _num_different(batch, second, "tokens"),
            f"different_tokens_if_{_LOST_READ_SHARE:.0%}_of_the_reads_find_nothing": _num_different(
                lossy, second, "tokens"
            ),
            "different_tokens_if_all_reads_fail": _num_different(without_disk, second, "tokens"),
            "tokens_cached": [_sum(each, "cached") for each in (batch, lossy, without_disk)],
        },
        "control_changed_answers": f"{num_changed} of {len(changed)}",
        "median_ms": {
            "computed, of the first questions": _median_ms(first[::_QUESTIONS_PER_DOCUMENT]),
            "own prefix cache, of the first questions": _median_ms(second[::_QUESTIONS_PER_DOCUMENT]),
            "disk tier, of the first questions": _median_ms(after_restart[::_QUESTIONS_PER_DOCUMENT]),
            "computed, without the connector, of the first questions": _median_ms(
                without_tier[::_QUESTIONS_PER_DOCUMENT]
            ),
        },
        "counts_of_the_tier": counts["counts"],
        "counts_after_restart": counts_after_restart["counts"],
    }


def measure_kills(worker: Worker, model: Path, folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill vLLM while it saves, and verify the answers after each restart."""
    rng = random.Random(seed)
    first_answers: dict[int, Answer] = {}
    first_endless = 1
    num_wrong = num_verified = num_hits = num_less_cached = 0
    for _ in range(num_kills):
        answered = sorted(first_answers)  # the newest first: prompts have the numbers -1, -2 and so on
        num_random = min(len(answered), _VERIFIED_PROMPTS - _NEWEST_PROMPTS)
        verified = answered[:_NEWEST_PROMPTS] + rng.sample(answered, num_random)
        task = {
            "model": str(model),
            "tier": {"disk_path": str(folder), "disk_bytes": _KILL_DISK_BYTES},
            "prompts": verified,
            "is_endless": True,
            "first_endless": first_endless,
        }
        process_id = worker.start(task)
        is_verified = False
        kill_at_s = float("inf")
        for answer in worker.answers():
            if "verified" in answer:
                is_verified = True
            elif "prompt" in answer and not is_verified:
                expected = first_answers[answer["prompt"]]
                num_verified += 1
                num_hits += answer["cached"] > 0
                num_less_cached += answer["cached"] < expected["reusable"]
                num_wrong += answer["tokens"] != expected["tokens"]
            elif "prompt" in answer:
                first_answers[answer["prompt"]] = {**answer, "reusable": _REUSABLE_TOKENS}
                first_endless = 1 - answer["prompt"]  # the process after the kill continues with the next prompt
                if kill_at_s == float("inf"):
                    kill_at_s = time.monotonic() + rng.random() * _MAX_KILL_DELAY_S
            if is_verified and time.monotonic() >= kill_at_s:
                os.kill(process_id, signal.SIGKILL)
                kill_at_s = float("inf")
        print(f"{num_verified} answers after kills, {num_wrong} wrong, {num_hits} hits", file=sys.stderr)
    prompts = sorted(first_answers)[:_MAX_RECOMPUTED]
    recomputed: list[Answer] = []
    if prompts:
        *recomputed, _ = worker.run({"model": str(model), "tier": None, "prompts": prompts})
    num_wrong_without_tier = sum(each["tokens"] != first_answers[each["prompt"]]["tokens"] for each in recomputed)
    return {
        "kills": num_kills,
        "answers_verified": num_verified,
        "answers_with_hits": num_hits,
        "answers_whose_blocks_were_not_all_saved": num_less_cached,
        "wrong_answers": num_wrong,
        "wrong_answers_without_tier": num_wrong_without_tier,
    }


def _sum(answers: list[Answer], name: str) -> int:
    return sum(each[name] for each in answers)


def _num_different(answers: list[Answer], others: list[Answer], name: str) -> int:
    return sum(first[name] != second[name] for first, second in zip(answers, others, strict=True))


def _median_ms(answers: list[Answer]) -> float:
    seconds: list[float] = [each["took_s"] for each in answers]
    return round(1000 * statistics.median(seconds), 2)


def has_wrong_answers(restart: Mapping[str, Any], kill: Mapping[str, Any]) -> bool:
    """Whether the result of `measure_restart` or of `measure_kills` counts different or wrong answers."""
    counts = {**restart, **restart["all_at_once"], **kill}
    return any(count for name, count in counts.items() if name.startswith(("different_", "wrong_")))


def main() -> int:
    """Run the comparison, print it, and write it as JSON. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="another checkpoint, to measure the times of a larger model")
    parser.add_argument(
        "--python", type=Path, help="interpreter of an environment with vLLM, xxhash and sortedcontainers"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    environments = Environments(cache_directory() / "peers", {"vllm-tier": _RECIPE})
    python = arguments.python or environments.python("vllm-tier")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in ("bench", "radixkv"):  # vLLM looks for packages that are named like other folders of the checkout
            (folder / name).symlink_to(_ROOT / name)
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        model = arguments.model or folder / "model"
        if arguments.model is None:
            command = [str(python), "-m", "bench.parts.vllm_tier_worker", "--save", str(model)]
            subprocess.run(command, check=True, env=environment)
        worker = Worker(python, environment, folder / "log")
        restart = measure_restart(worker, model, folder / "tiers", arguments.prompts)
        kill = measure_kills(worker, model, folder / "killed tiers", arguments.kills, arguments.seed)
        worker.close()
    result = {"restart": restart, "kill": kill}
    print(json.dumps(result, indent=2))
    write_result(arguments.json, "bench.vllm_tier", None, {"vllm": _VLLM.requirements[0], **result})
    return int(has_wrong_answers(restart, kill))


if __name__ == "__main__":
    sys.exit(main())
