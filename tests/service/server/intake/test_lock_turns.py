import contextlib
import sys
from types import SimpleNamespace
from typing import cast

import pytest

from radixkv.config import ServerConfig
from radixkv.engine.engine import Engine
from radixkv.service.server.intake.lock_turns import short_lock_turns
from radixkv.service.server.server import run


@pytest.fixture
def pythons_own_s():
    """Python's own turn, in seconds, which is set again afterwards."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before_s)


def test_turns_take_1_ms_until_the_end(pythons_own_s):
    with contextlib.suppress(KeyError), short_lock_turns():
        assert sys.getswitchinterval() == pytest.approx(0.001)
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(pythons_own_s)


def test_shorter_turns_stay(pythons_own_s):
    sys.setswitchinterval(0.0002)
    asked_s = sys.getswitchinterval()  # a microsecond less, where it is rounded
    with short_lock_turns():
        assert sys.getswitchinterval() == asked_s < 0.0005 < pythons_own_s


def test_a_server_that_runs_has_short_turns(pythons_own_s):
    def start():
        assert sys.getswitchinterval() == pytest.approx(0.001)
        raise KeyError

    with pytest.raises(KeyError):
        run(cast("Engine", SimpleNamespace(start=start)), ServerConfig())
    assert sys.getswitchinterval() == pytest.approx(pythons_own_s)
