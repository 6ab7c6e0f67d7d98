"""Runs one trial on a machine without a GPU: tries the candidates for Hopper in Triton's interpreter."""

from __future__ import annotations

import sys

from bench.gpu.dry_run import interpreted
from radixkv.model.attention.interface import AttentionUse
from radixkv.model.attention.triton_kernels import TritonKernels, candidates
from radixkv.startup import attention_trial

CAPABILITY = (9, 0)  # of a Hopper GPU


def hopper_candidates(use: AttentionUse) -> dict[str, TritonKernels]:
    """Return the candidates that a Hopper GPU would have."""
    return candidates(use, CAPABILITY)


def main() -> int:
    """Run the trial that is described on stdin; see `attention_trial.main`."""
    # The trial looks up its kernels with the function of this name.
    vars(attention_trial)["attention_candidates"] = hopper_candidates
    with interpreted():
        return attention_trial.main()


if __name__ == "__main__":
    sys.exit(main())
