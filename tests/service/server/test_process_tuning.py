import contextlib
import gc
import sys
import weakref
from types import SimpleNamespace
from typing import cast

import pytest

from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import ServerConfig
from radixkv.engine.engine import Engine
from radixkv.namespace import Namespace
from radixkv.service.server.process_tuning import frozen_survivors, short_gil_switch_interval
from radixkv.service.server.server import run
from tests.fake_runner import tokens


class Thing:
    pass


def num_traversed(things):
    """Count the objects that the next full collection traverses."""
    return len({id(each) for each in things} & {id(each) for each in gc.get_objects()})


def test_objects_that_survive_a_full_collection_are_not_traversed_again():
    with frozen_survivors():
        things = [Thing() for _ in range(1000)]
        assert num_traversed(things) == 1000
        gc.collect(1)
        assert num_traversed(things) == 1000
        gc.collect()
        assert num_traversed(things) == 0


def test_the_nodes_of_a_cache_are_traversed_once_and_freed_when_evicted():
    with frozen_survivors():
        cache = PrefixCache(256, block_size=2)
        for number in range(100):
            with cache.lease(Namespace("", ""), tokens([number, number])) as lease:
                lease.commit(2)
        assert sum(type(each) is Node for each in gc.get_objects()) >= 100
        gc.collect()
        assert not any(type(each) is Node for each in gc.get_objects())
        num_frozen = gc.get_freeze_count()
        cache.purge(tenant="")
        assert gc.get_freeze_count() <= num_frozen - 100


def test_frozen_objects_are_freed_when_nothing_refers_to_them():
    with frozen_survivors():
        thing = Thing()
        gc.collect()
        reference = weakref.ref(thing)
        del thing
        assert reference() is None


def test_nothing_stays_frozen_at_the_end_not_even_after_an_error():
    callbacks_before = list(gc.callbacks)
    with contextlib.suppress(ValueError), frozen_survivors():
        assert len(gc.callbacks) == len(callbacks_before) + 1
        raise ValueError
    assert (gc.get_freeze_count(), gc.callbacks) == (0, callbacks_before)


@pytest.fixture
def default_interval_s():
    """The GIL switch interval in seconds, which is restored afterwards."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before_s)


def test_the_gil_switch_interval_is_1_ms_until_the_end(default_interval_s):
    with contextlib.suppress(KeyError), short_gil_switch_interval():
        assert sys.getswitchinterval() == pytest.approx(0.001)
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(default_interval_s)


def test_a_shorter_gil_switch_interval_is_kept(default_interval_s):
    sys.setswitchinterval(0.0002)
    interval_s = sys.getswitchinterval()  # a microsecond less, where it is rounded
    with short_gil_switch_interval():
        assert sys.getswitchinterval() == interval_s < 0.0005 < default_interval_s


def test_a_server_that_runs_has_a_short_gil_switch_interval(default_interval_s):
    def start():
        assert sys.getswitchinterval() == pytest.approx(0.001)
        raise KeyError

    with pytest.raises(KeyError):
        run(cast("Engine", SimpleNamespace(start=start)), ServerConfig())
    assert sys.getswitchinterval() == pytest.approx(default_interval_s)
