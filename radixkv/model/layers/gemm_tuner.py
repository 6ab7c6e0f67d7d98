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
from radixkv.kernels.cpu.gemm_trial import LEAD, GemmChoice, choose_gemm
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
_LARGEST_FILE = 2**20  # bytes; a shape takes 400

# What else decides how libraries compute.
_ENVIRONMENT = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_")


# Seconds of all trials of a start, on one core or, with more threads, on the clock. The trials of a model of 0.2B whose
# vocabulary has 262,144 tokens took 5.0 s in bfloat16 on a Xeon with AMX, and 29 s without a compiler for AVX2, 24 of
# them for the weights of the logits; with this budget 1.2 and 3.9 s.
TRIAL_BUDGET_S = 4.0

# The part of the budget for weights whose part in the model is not known: experts, and heads with latent attention.
_UNKNOWN_SHARE = 0.125


class TrialBudget:
    """Divides the time for trials of a start among the shapes of a model's weights.

    A shape may take its share of the time, and what the shapes before it have left over:

        budget    [ logits 62 % ................ | gate and up 16 % | down 8 % | ... )
        trials    [ logits .... )[ gate and up )  may take all that was granted so far

    Args:
        budget_s: of all trials together.
        report: is called with what is tried.
    """

    def __init__(self, budget_s: float = TRIAL_BUDGET_S, report: Report = report_nothing) -> None:
        self.report = report
        self._budget_s = budget_s
        self._left_s = 0.0  # of what was granted

    def grant(self, share: float) -> float:
        """Return the seconds that the trial of the next shape may take.

        Args:
            share: the part of the model's weights that have this shape, 0 to 1.
        """
        self._left_s += share * self._budget_s
        return self._left_s

    def spend(self, seconds: float) -> None:
        """Take the time of a trial from what is left. If checks took more than was granted, other shapes do not pay."""
        self._left_s = max(0.0, self._left_s - seconds)


class GemmTuner:
    """Tries each shape of weight once, and keeps the result in a file for this machine.

    The file is a memory, never a need: one that can't be read, written or understood is logged and done without.

    Args:
        is_exact: whether rows must have the same bits, whatever their number.
        weights: `auto`, or the format that weights are quantized to; see `ModelConfig`.
        directory: of the file; None takes that of `radixkv.config.cache_directory`.
        budget: of the trials; None for no bound.
    """

    def __init__(
        self,
        *,
        is_exact: bool,
        weights: str = "auto",
        directory: Path | None = None,
        budget: TrialBudget | None = None,
    ) -> None:
        # Integers are exact for any number of rows. Some numbers are slow: a lone row takes 170 times as long as two.
        self._is_exact = is_exact or weights == "int8"
        self._weights = weights
        self._budget = budget
        self._file = (directory or cache_directory()) / _FILE
        self._known: dict[str, GemmChoice | None] = {}
        self._remembered = self._read()
        self._has_announced = False  # that trials take time

    def choose(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        backends: tuple[str, ...] | None = None,
        most_rows: int = SIZES[-1],
        share: float = _UNKNOWN_SHARE,
        *,
        is_head: bool = False,
    ) -> GemmChoice | None:
        """Return the GEMM backend for weights of this shape, dtype and strides.

        The trial of a shape that is not remembered may take its part of the budget; `choose_gemm` says what is
        chosen then. It is remembered in any case, so that later starts compute the same bits.

        Args:
            weight: `[out_features, in_features]` on a CPU.
            bias: `[out_features]`, or None.
            backends: names of candidates; None for all that fit the configured weights.
            most_rows: rows of a call at most.
            share: the part of the model's weights that have this shape, 0 to 1.
            is_head: whether the weight computes logits, which have at least 8 bits.

        Returns:
            The choice; None if no backend is batch-invariant.
        """
        if backends is None:
            backends = self._candidates(weight, is_head)
        if backends[0] in QUANTIZED_BITS:  # nothing else is asked for, and it is batch-invariant
            return GemmChoice(backends[0])
        key = self._key(weight, bias, backends, most_rows)
        if key not in self._known:
            limit_s = math.inf if self._budget is None else self._budget.grant(share)
            choice = _parsed(self._remembered.get(key), backends, is_exact=self._is_exact)
            if choice is None:
                choice = self._tried(weight, bias, backends, most_rows, limit_s)
                if choice is not None:
                    choice = self._settled(key, choice, backends)
            self._known[key] = choice
        return self._known[key]

    def _candidates(self, weight: torch.Tensor, is_head: bool) -> tuple[str, ...]:
        if self._weights in QUANTIZED_BITS and gemm.multiplies_quantized(weight):
            return ("q8",) if is_head else (self._weights,)
        return ("int8",) if self._weights == "int8" else gemm_backends(weight)

    def _tried(
        self, weight: torch.Tensor, bias: torch.Tensor | None, backends: tuple[str, ...], most_rows: int, limit_s: float
    ) -> GemmChoice | None:
        if not self._has_announced:
            self._has_announced = True
            _log.info("choosing a matmul for each shape of weight, which %s keeps for later starts", self._file)
        dtype = str(weight.dtype).removeprefix("torch.")
        if self._budget is not None:
            self._budget.report(f"trying matmuls with {weight.shape[0]} by {weight.shape[1]} weights in {dtype}")
        now = Stopwatch.here().now
        start_s = now()
        choice = choose_gemm(weight, bias, backends, is_exact=self._is_exact, most_rows=most_rows, limit_s=limit_s)
        took_s = now() - start_s
        if self._budget is not None:
            self._budget.spend(took_s)
        _log.info(
            "tried matmuls with %d by %d weights in %s in %.1f s: %s",
            weight.shape[0],
            weight.shape[1],
            dtype,
            took_s,
            "no library gives a row the same bits in batches of any size" if choice is None else choice.backend,
        )
        return choice

    def _key(self, weight: torch.Tensor, bias: torch.Tensor | None, backends: tuple[str, ...], most_rows: int) -> str:
        mode = "exact" if self._is_exact else "fast"
        has_bias = "" if bias is None else "+bias"
        shape = f"{tuple(weight.shape)}{weight.stride()}{has_bias} {weight.dtype}"
        threads = torch.get_num_threads()
        return f"{_machine()} {threads} threads {mode} {shape} {most_rows} rows {','.join(backends)}"

    def _read(self) -> dict[str, Any]:
        try:
            if self._file.stat().st_size > _LARGEST_FILE:
                raise ValueError(f"it has more than {_LARGEST_FILE} bytes")
            tree = json.loads(self._file.read_text(encoding="utf-8"))
            if not isinstance(tree, dict):
                raise ValueError("it holds no object")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            _log.info("%s can't be read, so matmuls are tried again: %s", self._file, error)
            return {}
        return tree

    def _settled(self, key: str, choice: GemmChoice, backends: tuple[str, ...]) -> GemmChoice:
        """Add a choice to the file, and return it; or return that of a process which was first.

        Replicas that start side by side try the same shapes. Trials depend on time, and choices decide the last bits of
        answers, which should be the same on all of them.
        """
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with (self._file.parent / _LOCK).open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
                tree = self._read()
                first = _parsed(tree.get(key), backends, is_exact=self._is_exact)
                if first is not None:
                    return first
                self._write({**tree, key: {"backend": choice.backend, "costs": [list(pair) for pair in choice.costs]}})
        except OSError as error:
            _log.info("%s can't be written, so the next start tries matmuls again: %s", self._file, error)
        return choice

    def _write(self, tree: dict[str, Any]) -> None:
        """Replace the file. No reader sees half of it."""
        with tempfile.TemporaryDirectory(dir=self._file.parent) as directory:
            written = Path(directory) / _FILE
            written.write_text(json.dumps(tree, indent=1), encoding="utf-8")
            written.replace(self._file)


def _parsed(entry: Any, backends: tuple[str, ...], *, is_exact: bool) -> GemmChoice | None:
    """Read what the file remembers of a shape; None for nothing, or for something that this program did not write."""
    try:
        backend = entry["backend"]
        costs = tuple((int(size), float(cost_s)) for size, cost_s in entry["costs"])
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
    are_costs = all(size in SIZES and 0 < cost_s < math.inf for size, cost_s in costs)
    is_known = backend in backends and backend in GEMM_BACKENDS and are_costs
    if not is_known:
        return None
    needs_costs = is_exact and not GEMM_BACKENDS[backend].rows_are_alike
    return GemmChoice(backend, costs) if bool(costs) == needs_costs else None


@cache
def _machine() -> str:
    """A digest of all that decides how libraries compute: processor, libraries, settings, sources, and what we try."""
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
    parts = (
        *(platform.machine(), platform.processor(), *processor_facts(), *settings),
        *(torch.__version__, torch.__config__.show(), torch.backends.cpu.get_cpu_capability(), f"{SIZES} {LEAD}"),
        *map(digest_of, VARIANTS),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
