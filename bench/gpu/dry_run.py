"""Runs Triton kernels on a CPU through Triton's interpreter, as the tests do.

As a program, it runs one trial on a machine without a GPU: it tries the candidates for Hopper in the interpreter.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from radixkv.model.attention.interface import AttentionUse
from radixkv.model.attention.triton_kernels import TritonKernels, candidates
from radixkv.startup import attention_trial

CAPABILITY = (9, 0)  # of a Hopper GPU


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run Triton kernels on the CPU inside a `with` statement."""
    import pytest

    from tests.kernels.gpu.interpreter import interpret_kernels

    with pytest.MonkeyPatch.context() as patch:
        interpret_kernels(patch)
        yield


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
