from bench.hostile.isolation import cache_trials
from bench.hostile.isolation.cache_trials import Isolation, search
from radixkv.namespace import Namespace


def test_no_namespace_hits_the_cache_of_another():
    assert search(2000, 3) == Isolation(trials=2000, cross_hits=0, controls=100, control_hits=100)


def test_a_cache_that_concatenates_the_names_of_a_namespace_is_detected(monkeypatch):
    concatenated = [Namespace("".join(names)) for names in cache_trials.NAMESPACES]
    monkeypatch.setattr(cache_trials, "NAMESPACES", concatenated)
    assert search(2000, 3).cross_hits > 0
