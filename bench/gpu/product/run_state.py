"""What the stages of the product part share: a state file and a Triton cache in the folder of the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.parts.environment import output_of
from bench.parts.result_file import write_json

STATE_FILE = Path("product_state.json")
TRITON_CACHE = Path("triton_cache")


def read_state(folder: Path = Path()) -> dict[str, Any]:
    """Return the state of the run; empty before the first stage has written it.

    Its keys:
        model: the value of `radixkv serve --model`.
        vocab_size, weight_bytes: vocabulary size and size of the weights.
        rates: rates of copies in GB/s, and of a large matmul in TFLOP/s; the names of the values have the unit.
        servers: the servers that run, by name; see `ProductServer`.
        quiet_since: number of files in the Triton cache, and used MiB of the device, when the servers listened.
    """
    file = folder / STATE_FILE
    state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return state


def update_state(**facts: object) -> None:
    """Add values to the state of the run. Stages run one at a time, so no other process writes the file meanwhile."""
    write_json(STATE_FILE.absolute(), {**read_state(), **facts})


def use_triton_cache() -> None:
    """Set the Triton cache of the run for this process and the processes that it starts."""
    os.environ["TRITON_CACHE_DIR"] = str(TRITON_CACHE.absolute())


def num_compiled_files() -> int:
    """Return the number of files in the Triton cache of the run."""
    return sum(len(files) for _, _, files in os.walk(TRITON_CACHE))


def device_memory_mib() -> dict[str, float] | None:
    """Return the `used`, `free` and `total` MiB of the first GPU; None without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.free,memory.total", "--format=csv,noheader,nounits"]
    output = output_of(command)
    if output is None:
        return None
    used, free, total = (float(number) for number in output.splitlines()[0].split(","))
    return {"used": used, "free": free, "total": total}
