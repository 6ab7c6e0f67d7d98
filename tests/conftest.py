"""Settings of every test run: the environment, the sampled cases, a timeout for teardowns, and shared fixtures."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from random import Random
from types import SimpleNamespace

import pytest

from radixkv.config.cache_directory import cache_directory

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TQDM_DISABLE"] = "1"
# All workers of a run share a new cache directory, so that no results of earlier runs are used. Only compiled kernels
# are reused: their names contain a digest of their sources.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compiled_kernels = cache_directory() / "kernels"
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="radixkv-tests-")
    with contextlib.suppress(OSError):
        _compiled_kernels.mkdir(parents=True, exist_ok=True)
        cache_directory().mkdir()
        (cache_directory() / "kernels").symlink_to(_compiled_kernels)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark those cases `long` that the marker `sampled` leaves to `make test-long`.

    The sample of a parametrized test is random, but the same in every run.
    """
    cases_by_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not any(map(item.get_closest_marker, ("long", "slow"))):
            cases_by_test[item.nodeid.partition("[")[0]].append(item)
    for test_id, cases in cases_by_test.items():
        marker = cases[0].get_closest_marker("sampled")
        assert marker is not None
        num_sampled = math.ceil(len(cases) / marker.kwargs["one_in"])
        sample = Random(test_id).sample(range(len(cases)), num_sampled)
        for index in set(range(len(cases))) - set(sample):
            cases[index].add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Set a timeout for teardowns. The timeouts in pyproject.toml do not apply to the teardown of a failed test."""
    faulthandler.dump_traceback_later(float(item.config.getini("faulthandler_timeout")), exit=True)
    return (yield)


@pytest.fixture(scope="module")
def forked_servers() -> Iterator[None]:
    """Fork the servers that benchmarks start, instead of starting a new Python interpreter for each."""
    from bench.parts import server_process
    from tests.forked_process import ForkedProcess

    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "TimeoutExpired")}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(server_process, "subprocess", SimpleNamespace(Popen=ForkedProcess, **names))
        yield
