import ctypes

import pytest

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.native.compiler import NotCompiled
from radixkv.kernels.native.library import load_library, runnable_variants
from radixkv.kernels.native.variants import VARIANTS


@pytest.fixture(scope="session", params=runnable_variants() or VARIANTS[-1:], ids=lambda variant: variant.name)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels, for each set of instructions that this processor can run."""
    if not runnable_variants():
        pytest.skip("a processor without AVX2")
    try:
        return load_library(cache_directory(), variants=[request.param])
    except NotCompiled as reason:
        if "there is no g++" not in str(reason):  # what can't be compiled where it should be is a failure
            raise
        pytest.skip(str(reason))
