import ctypes
from pathlib import Path

import pytest

from radixkv.config.cache_directory import cache_directory
from radixkv.kernels.native.library import NotCompiledError, load_library


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """The kernels, compiled once for all tests of a run."""
    folder: Path = cache_directory()
    try:
        return load_library(folder)
    except NotCompiledError as reason:
        pytest.skip(str(reason))
