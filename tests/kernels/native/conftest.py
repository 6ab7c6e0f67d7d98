import ctypes

import pytest
import torch

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.native.library import NotCompiled, load_library

# What kernels may be compiled for here: a processor with AVX-512 has AVX2, too.
CAPABILITIES = ["AVX2", "AVX512"] if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else ["AVX2"]


@pytest.fixture(scope="session", params=CAPABILITIES)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels, compiled once for all tests of a run."""
    try:
        return load_library(cache_directory(), capability=request.param)
    except NotCompiled as reason:
        pytest.skip(str(reason))
