"""Fixtures of tests that start engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixkv.offload.tiers.guard import GuardedStore
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def patient_guards() -> Iterator[None]:
    """Let calls of stores take `PATIENCE_S`: on a busy machine they may exceed the usual limit, which would be a miss.

    Use this fixture by `pytestmark`, so that pytest sets it up before the engines that a module shares.
    """
    limits = {**(GuardedStore.__init__.__kwdefaults__ or {}), "limit_s": PATIENCE_S}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GuardedStore.__init__, "__kwdefaults__", limits)
        yield
