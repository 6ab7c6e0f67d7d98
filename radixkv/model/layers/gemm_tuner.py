"""Chooses a GEMM backend for each shape of weight on this machine, and keeps the choice for the next load."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, QUANTIZED_BITS, gemm_backends
from radixkv.kernels.cpu.gemm_trial import HEAD_START, GemmChoice, choose_gemm
from radixkv.kernels.cpu.row_tiles import SIZES
from radixkv.kernels.cpu.stopwatch import Stopwatch
from radixkv.kernels.native import gemm
from radixkv.kernels.native.compiler import digest_of
from radixkv.kernels.native.processor import processor_facts
from radixkv.kernels.native.variants import VARIANTS
from radixkv.model.report import Report, report_nothing

_log = logging.getLogger(__name__)

_FILE = "gemms.json"
_LOCK = "gemms.lock"  # held while the file is read and replaced
_MAX_FILE_BYTES = 2**20  # the entry of a shape takes about 400 bytes
# Prefixes of environment variables that affect the results of libraries.
_ENVIRONMENT = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_")


# Time for all trials of a start: CPU seconds with one thread, wall time with more. The trials of a 0.2B model with a
# vocabulary of 262,144 tokens took 5.0 s in bfloat16 on a Xeon with AMX. Without a compiler for AVX2 they took 29 s, 24
# of them for the LM head. With this budget they take 1.2 and 3.9 s.
TRIAL_BUDGET_S = 4.0

# The share of the budget for weights whose share of the model is not known: experts, and heads with latent attention.
_UNKNOWN_SHARE = 0.125


class TrialBudget:
    """Divides the time for trials at a start among the shapes of a model's weights.

    A shape may use its share of the time, and the time that previous shapes did not use:

        budget    [ logits 62 % ................ | gate and up 16 % | down 8 % | ... )
        trials    [ logits .... )[ gate and up )  may take all that was granted so far

    Args:
        budget_s: time for all trials together.
        report: called with a description of each trial.
    """

    def __init__(self, budget_s: float = TRIAL_BUDGET_S, report: Report = report_nothing) -> None:
        self.report = report
        self._budget_s = budget_s
        self._unused_s = 0.0  # granted time that was not used

    def grant(self, share: float) -> float:
        """Return the seconds that the trial of the next shape may take.

        Args:
            share: the share of the model's weights that have this shape, 0 to 1.
        """
        self._unused_s += share * self._budget_s
        return self._unused_s

    def spend(self, seconds: float) -> None:
        """Subtract the time of a trial. If it took more than was granted, other shapes still get their own share."""
        self._unused_s = max(0.0, self._unused_s - seconds)


class GemmTuner:
    """Tries each shape of weight once, and keeps the result in a file for this machine.

    The file is optional: shapes are tried again if it is missing. The same holds if it cannot be read or written, or is
    invalid, which is also logged.

    Args:
        is_exact: whether results must be batch-invariant.
        weights: `auto`, or the format that weights are quantized to; see `ModelConfig`.
        directory: directory of the file; None for that of `radixkv.config.cache_directory`.
        budget: time for the trials; None for no bound.
    """

    def __init__(
        self,
        *,
        is_exact: bool,
        weights: str = "auto",
        directory: Path | None = None,
        budget: TrialBudget | None = None,
    ) -> None:
        # Results in int8 are the same for any row count, but some row counts are slow: one row takes 170 times as long
        # as two. So row counts are timed as in exact mode.
        self._is_exact = is_exact or weights == "int8"
        self._weights = weights
        self._budget = budget
        self._file = (directory or cache_directory()) / _FILE
        self._choices: dict[str, GemmChoice | None] = {}
        self._entries = self._read()  # of the file when the tuner was created
        self._has_announced = False  # whether the log says that trials take time

    def choose(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        backends: tuple[str, ...] | None = None,
        max_rows: int = SIZES[-1],
        share: float = _UNKNOWN_SHARE,
        *,
        is_head: bool = False,
        stored: str | None = None,
    ) -> GemmChoice | None:
        """Return the GEMM backend for weights of this shape, dtype and strides.

        The trial of a shape that is not in the file may take its share of the budget; `choose_gemm` documents what is
        chosen at this limit. Every choice of a trial is kept in the file, so that later starts compute the same bits.

        Args:
            weight: `[out_features, in_features]` on a CPU.
            bias: `[out_features]`, or None.
            backends: names of candidates; None for all that fit the configured weights.
            max_rows: maximum number of rows per call.
            share: the share of the model's weights that have this shape, 0 to 1.
            is_head: whether the weight computes logits. If weights are quantized to 4 bits, this one is to 8 bits.
            stored: quantized format of the weight in its file; None if it is not quantized there.

        Returns:
            The choice; None if no backend is batch-invariant.
        """
        if backends is None:
            backends = self._candidates(weight, is_head, stored)
        if backends[0] in QUANTIZED_BITS:  # the configured format, which is batch-invariant
            return GemmChoice(backends[0])
        key = self._key(weight, bias, backends, max_rows)
        if key not in self._choices:
            limit_s = math.inf if self._budget is None else self._budget.grant(share)
            choice = _parse_entry(self._entries.get(key), backends, is_exact=self._is_exact)
            if choice is None:
                choice = self._try(weight, bias, backends, max_rows, limit_s)
                if choice is not None:
                    choice = self._record(key, choice, backends)
            self._choices[key] = choice
        return self._choices[key]

    def _candidates(self, weight: torch.Tensor, is_head: bool, stored: str | None) -> tuple[str, ...]:
        weights_format = self._weights
        if weights_format == "auto" and stored is not None:
            weights_format = stored
        elif weights_format == "q4" and is_head:
            weights_format = "q8"
        if weights_format in QUANTIZED_BITS and gemm.multiplies_quantized(weight):
            return (weights_format,)
        return ("int8",) if weights_format == "int8" else gemm_backends(weight)

    def _try(
        self, weight: torch.Tensor, bias: torch.Tensor | None, backends: tuple[str, ...], max_rows: int, limit_s: float
    ) -> GemmChoice | None:
        if not self._has_announced:
            self._has_announced = True
            _log.info("choosing a matmul for each shape of weight, which %s keeps for later starts", self._file)
        dtype = str(weight.dtype).removeprefix("torch.")
        if self._budget is not None:
            self._budget.report(f"trying matmuls with {weight.shape[0]} by {weight.shape[1]} weights in {dtype}")
        now = Stopwatch.here().now
        start_s = now()
        choice = choose_gemm(weight, bias, backends, is_exact=self._is_exact, max_rows=max_rows, limit_s=limit_s)
        took_s = now() - start_s
        if self._budget is not None:
            self._budget.spend(took_s)
        _log.info(
            "tried matmuls with %d by %d weights in %s in %.1f s: %s",
            weight.shape[0],
            weight.shape[1],
            dtype,
            took_s,
            "no backend is batch-invariant" if choice is None else choice.backend,
        )
        return choice

    def _key(self, weight: torch.Tensor, bias: torch.Tensor | None, backends: tuple[str, ...], max_rows: int) -> str:
        mode = "exact" if self._is_exact else "fast"
        has_bias = "" if bias is None else "+bias"
        shape = f"{tuple(weight.shape)}{weight.stride()}{has_bias} {weight.dtype}"
        threads = torch.get_num_threads()
        return f"{_machine_digest()} {threads} threads {mode} {shape} {max_rows} rows {','.join(backends)}"

    def _read(self) -> dict[str, Any]:
        try:
            if self._file.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
            entries = json.loads(self._file.read_text(encoding="utf-8"))
            if not isinstance(entries, dict):
                raise ValueError("it holds no object")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            _log.info("%s can't be read, so matmuls are tried again: %s", self._file, error)
            return {}
        return entries

    def _record(self, key: str, choice: GemmChoice, backends: tuple[str, ...]) -> GemmChoice:
        """Add a choice to the file and return it, or return the choice that another process has added first.

        Replicas that start at the same time try the same shapes. The outcome of a trial depends on timing, and the
        choice affects the last bits of results, which should be the same on all replicas.
        """
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with (self._file.parent / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
                entries = self._read()
                earlier_choice = _parse_entry(entries.get(key), backends, is_exact=self._is_exact)
                if earlier_choice is not None:
                    return earlier_choice
                self._write(
                    {**entries, key: {"backend": choice.backend, "costs": [list(pair) for pair in choice.costs]}}
                )
        except OSError as error:
            _log.info("%s can't be written, so the next start tries matmuls again: %s", self._file, error)
        return choice

    def _write(self, entries: dict[str, Any]) -> None:
        """Replace the file atomically."""
        with tempfile.TemporaryDirectory(dir=self._file.parent) as directory:
            new_file = Path(directory) / _FILE
            new_file.write_text(json.dumps(entries, indent=1), encoding="utf-8")
            new_file.replace(self._file)


def _parse_entry(entry: Any, backends: tuple[str, ...], *, is_exact: bool) -> GemmChoice | None:
    """Parse the file's entry of a shape; None if there is none, or if it is invalid."""
    try:
        backend = entry["backend"]
        costs = tuple((int(size), float(cost_s)) for size, cost_s in entry["costs"])
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    are_costs_valid = all(size in SIZES and 0 < cost_s < math.inf for size, cost_s in costs)
    if backend not in backends or backend not in GEMM_BACKENDS or not are_costs_valid:
        return None
    needs_costs = is_exact and not GEMM_BACKENDS[backend].is_batch_invariant
    return GemmChoice(backend, costs) if bool(costs) == needs_costs else None


@cache
def _machine_digest() -> str:
    """Return a digest of what else affects trials: processor, libraries, settings and C++ sources."""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
    facts = (
        *(platform.machine(), platform.processor(), *processor_facts(), *settings),
        *(torch.__version__, torch.__config__.show(), torch.backends.cpu.get_cpu_capability(), f"{SIZES} {HEAD_START}"),
        *map(digest_of, VARIANTS),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
