"""Kernels that are tried in a separate process can't harm the service."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch
import triton

from radixkv.errors import UnsupportedModel
from radixkv.model.attention.interface import AttentionKind, AttentionUse
from radixkv.startup.attention_choice import try_candidates
from radixkv.startup.attention_trial import _from_json, _to_json, try_attention
from radixkv.storage.device_pool import KVShape
from tests.patience import PATIENCE_S

_TRITON_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))

KIND = AttentionKind(1, window=300, softcap=None)
SHAPE = KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)


def attempt(name: str, program: str | None = None, timeout_s: float = PATIENCE_S, shape: KVShape = SHAPE) -> None:
    """Try the kernels of this name in a separate process, or run a Python program there instead."""
    command = {} if program is None else {"command": [sys.executable, "-c", program]}
    use = AttentionUse((KIND,), torch.float32, shape, 16, torch.device("cpu"), is_exact=False)
    try_attention(name, use, timeout_s=timeout_s, **command)


@pytest.mark.long
@pytest.mark.skipif(
    _TRITON_VERSION < (3, 9), reason="its interpreter needs corrections that a child process does not get"
)
def test_correct_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert try_candidates(["attention through pointers", "last"], attempt) == "attention through pointers"


def test_rejected_kernels_have_a_reason() -> None:
    """Without Triton's interpreter, its kernels do not run on a CPU."""
    with pytest.raises(UnsupportedModel, match="attention over int8 on cpu: does not run there: "):
        attempt("attention through pointers", shape=SHAPE.stored_as("int8"))


def test_a_stalled_process_is_killed(tmp_path: Path) -> None:
    pid_file, timeout_s = tmp_path / "pid", 0.5
    program = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    # On a busy machine, the process may not start within the timeout; then it gets more time.
    while not pid_file.exists() or not pid_file.read_text():
        with pytest.raises(UnsupportedModel, match=rf"^its trial did not end within {timeout_s} s$"):
            attempt("any", program, timeout_s=timeout_s)
        timeout_s *= 3
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_a_process_that_cannot_be_started_is_reported() -> None:
    use = AttentionUse((KIND,), torch.float32, SHAPE, 16, torch.device("cpu"), is_exact=False)
    with pytest.raises(UnsupportedModel, match=r"^its trial can't be started: .*no-such-python"):
        try_attention("any", use, command=["/no-such-python"])


def test_a_trial_is_the_same_after_serialization() -> None:
    kinds = (AttentionKind(8, None, None), AttentionKind(8, 100, 30.0))
    shape = KVShape(2, 4, 80, torch.bfloat16).stored_as("fp8")
    use = AttentionUse(kinds, torch.bfloat16, shape, 64, torch.device("cuda:1"), is_exact=True)
    assert _from_json(_to_json("some kernels", use)) == ("some kernels", use)


def test_a_crashed_process_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    program = "import os, sys; print('an illegal memory access', file=sys.stderr, flush=True); os.abort()"
    with caplog.at_level(logging.WARNING):
        assert try_candidates(["first", "last"], lambda name: attempt(name, program)) == "last"
    assert caplog.messages == ["first is not used: its trial ended with status -6: an illegal memory access"]
