import contextlib
import gc
import weakref

from radixkv.cache.node import Node
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.namespace import Namespace
from radixkv.service.server.garbage.survivors import frozen_survivors
from tests.fake_runner import tokens


class Thing:
    pass


def num_walked(things):
    """Count the objects that the next full collection looks at."""
    return len({id(each) for each in things} & {id(each) for each in gc.get_objects()})


def test_what_survives_a_full_collection_is_walked_no_more():
    with frozen_survivors():
        things = [Thing() for _ in range(1000)]
        assert num_walked(things) == 1000
        gc.collect(1)
        assert num_walked(things) == 1000
        gc.collect()
        assert num_walked(things) == 0


def test_the_nodes_of_a_cache_are_walked_once_and_freed_when_evicted():
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


def test_what_is_frozen_goes_when_nothing_refers_to_it():
    with frozen_survivors():
        thing = Thing()
        gc.collect()
        watch = weakref.ref(thing)
        del thing
        assert watch() is None


def test_nothing_stays_frozen_at_the_end_not_even_after_an_error():
    before = list(gc.callbacks)
    with contextlib.suppress(ValueError), frozen_survivors():
        assert len(gc.callbacks) == len(before) + 1
        raise ValueError
    assert (gc.get_freeze_count(), gc.callbacks) == (0, before)
