"""Values are found by tenant."""

from radixkv.cache.namespace_trees import NamespaceIndex
from radixkv.namespace import Namespace

PLAIN, SALTED, OTHER = Namespace("m", "acme"), Namespace("m", "acme", "", "salt"), Namespace("m", "other")


def test_values_are_listed_with_their_namespaces_in_the_order_in_which_they_came() -> None:
    index = NamespaceIndex[str]()
    for namespace, value in ((SALTED, "b"), (OTHER, "c"), (PLAIN, "a")):
        index.add(namespace, value)
    assert index.of("acme") == [("b", SALTED), ("a", PLAIN)]
    assert index.of(None) == [("b", SALTED), ("a", PLAIN), ("c", OTHER)]
    assert index.of("unknown") == []


def test_a_tenant_without_values_costs_nothing() -> None:
    index = NamespaceIndex[str]()
    index.add(PLAIN, "a")
    index.add(SALTED, "b")
    index.remove(PLAIN, "a")
    assert index.of("acme") == [("b", SALTED)]
    index.remove(SALTED, "b")
    assert index._by_tenant == {}
