"""The process of a trial with broken candidates: one hangs, one crashes, one is wrong and one is correct."""

from __future__ import annotations

import json
import os
import sys
import time

from radixkv.model.attention.refused_attention import DEQUANTIZED, SPECIALIZED, SPECIALIZED_DEQUANTIZED


def main() -> int:
    trial = sys.stdin.read()
    name = json.loads(trial)["name"]
    if name == SPECIALIZED:
        time.sleep(3600)
    if name == SPECIALIZED_DEQUANTIZED:
        print("an illegal memory access", file=sys.stderr, flush=True)
        os.abort()
    # Imported here, so that the candidates above hang and crash before torch is imported.
    import io

    from radixkv.model.attention.torch_kernels import TorchKernels
    from radixkv.startup import attention_trial

    class WrongKernels(TorchKernels):
        def paged_attention(self, *arguments):
            return 1.5 * super().paged_attention(*arguments)

    attention_trial.attention_candidates = lambda use: {name: WrongKernels() if name == DEQUANTIZED else TorchKernels()}
    sys.stdin = io.StringIO(trial)
    return attention_trial.main()


if __name__ == "__main__":
    sys.exit(main())
