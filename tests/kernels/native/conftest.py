import ctypes

import pytest

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.native.library import NotCompiled, load_library
from radixkv.kernels.native.processor import processor_capability

# What kernels may be compiled for here: a processor that has one of these has those before it, too.
ALL = ["AVX2", "AVX512", "AMX"]
CAPABILITIES = ALL[: 1 + ALL.index(processor_capability())] if processor_capability() in ALL else ["AVX2"]


@pytest.fixture(scope="session", params=CAPABILITIES)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels, compiled once for all tests of a run."""
    try:
        return load_library(cache_directory(), capability=request.param)
    except NotCompiled as reason:
        if "it needs" not in str(reason):  # what can't be compiled where it should be is a failure
            raise
        pytest.skip(str(reason))
