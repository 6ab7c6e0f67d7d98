"""Runs OpenVINO GenAI's continuous batching pipeline with its prefix cache, in the worker's own process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from bench.parts.peers.workers.loop import WorkerOptions, run_worker
from bench.parts.peers.workers.task import Done, Task

_PRECISION = {"float32": "f32", "bfloat16": "bf16"}
_KV_GIB = 1
_STEP_TOKENS = 512
_NO_AMX = "AVX512_CORE_BF16"
_MODULE = "bench.parts.peers.workers.openvino_worker"


class OpenVino:
    """A pipeline whose K/V have the model's own dtype. OpenVINO's default on a CPU is 8 bits, which changes answers.

    If OpenVINO refuses bfloat16, as on a CPU without instructions for it, it computes and stores K/V in float32.
    """

    packages = ("openvino", "openvino-genai")

    def __init__(self, options: WorkerOptions) -> None:
        # Another process tries first, because it may die of a signal: OpenVINO 2026.4.1 divides by zero while
        # compiling bfloat16 for AMX with one thread.
        trial_arguments = f"{str(options.model)!r}, {options.dtype!r}, {options.threads}"
        trial_code = f"from {_MODULE} import build_pipeline; build_pipeline({trial_arguments})"
        exit_status = subprocess.run([sys.executable, "-c", trial_code], check=False, capture_output=True).returncode
        refuses_bfloat16 = exit_status > 0 and options.dtype == "bfloat16"
        dtype = "float32" if refuses_bfloat16 else options.dtype
        self.notes = [f"in process; KV_CACHE_PRECISION={_PRECISION[dtype]}, whose default is u8"]
        if refuses_bfloat16:
            self.notes.append("refuses bfloat16 on this CPU: computes in float32")
        if exit_status < 0:
            os.environ["ONEDNN_MAX_CPU_ISA"] = _NO_AMX
            self.notes.append(f"died of signal {-exit_status} with {options.threads} thread: measured without AMX")
        self._pipeline = build_pipeline(str(options.model), dtype, options.threads)
        self._num_requests = 0

    def run(self, task: Task) -> Done:
        """Add requests, and run steps until all have finished."""
        import numpy as np
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = task.new_tokens, True, False
        prompts = [openvino.Tensor(np.asarray([prompt], dtype=np.int64)) for prompt in task.prompts]
        handles: dict[int, Any] = {}
        added_s: dict[int, float] = {}
        first_s: dict[int, float] = {}
        token_ids: list[list[int]] = [[] for _ in prompts]
        start_s = time.perf_counter()
        while len(added_s) < len(prompts) or handles:
            while len(handles) < task.at_once and len(added_s) < len(prompts):
                index = len(added_s)
                added_s[index] = time.perf_counter()
                handles[index] = self._pipeline.add_request(self._num_requests, prompts[index], config)
                self._num_requests += 1
            self._pipeline.step()
            now_s = time.perf_counter()
            for index, handle in list(handles.items()):
                while handle.can_read():
                    token_ids[index] += [each for output in handle.read().values() for each in output.generated_ids]
                    first_s.setdefault(index, now_s - added_s[index])
                if len(token_ids[index]) >= task.new_tokens:
                    del handles[index]
        wall_s = time.perf_counter() - start_s
        return Done(wall_s, [first_s[index] for index in range(len(prompts))], token_ids, [None] * len(prompts))

    def close(self) -> None:
        """Do nothing: the pipeline ends with the process."""


def build_pipeline(model: str, dtype: str, threads: int) -> Any:
    """Load a checkpoint that was exported to OpenVINO's format."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.cache_size = True, _KV_GIB
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = _STEP_TOKENS, 64
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": _PRECISION[dtype],
        "KV_CACHE_PRECISION": _PRECISION[dtype],
    }
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


if __name__ == "__main__":
    run_worker(OpenVino)
