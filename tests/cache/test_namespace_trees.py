"""The trees of all namespaces, which are listed by tenant."""

from radixkv.cache.namespace_trees import NamespaceTrees
from radixkv.cache.radix_tree import NO_ROOT_PREFIX
from radixkv.cache.tenants import Quota, TenantUsage
from radixkv.namespace import Namespace

PLAIN, SALTED, OTHER = Namespace("m", "acme"), Namespace("m", "acme", "", "salt"), Namespace("m", "other")


def trees_of(*namespaces: Namespace) -> NamespaceTrees:
    trees = NamespaceTrees(block_size=4, on_cut=lambda _: None)
    for namespace in namespaces:
        trees.create(namespace, TenantUsage(namespace.tenant, Quota()), NO_ROOT_PREFIX)
    return trees


def namespaces_of(trees: NamespaceTrees, tenant: str | None) -> list[Namespace]:
    return [tree.owner.namespace for tree in trees.of_tenant(tenant)]


def test_the_trees_of_one_tenant_or_of_all_are_listed_in_the_order_of_their_creation() -> None:
    trees = trees_of(SALTED, OTHER, PLAIN)
    assert namespaces_of(trees, "acme") == [SALTED, PLAIN]
    assert namespaces_of(trees, None) == [SALTED, OTHER, PLAIN]
    assert namespaces_of(trees, "unknown") == []


def test_a_tenant_without_trees_takes_no_memory() -> None:
    trees = trees_of(PLAIN, SALTED)
    del trees[PLAIN]
    assert namespaces_of(trees, "acme") == [SALTED]
    del trees[SALTED]
    assert trees._by_tenant == {}
