import pytest

from radixkv.api.segments import StoredNamespace
from radixkv.namespace import Namespace
from radixkv.offload.index import namespace_keys
from radixkv.offload.index.namespace_keys import NamespaceKeys

ACME = Namespace("m", "acme")
SALTED = Namespace("m", "acme", "", "salt")
OTHER = Namespace("m", "other")


def owned_of(**keys: Namespace) -> NamespaceKeys:
    """Return the keys of namespaces, given the namespace of each key."""
    owned = NamespaceKeys()
    for key, namespace in keys.items():
        owned.add(key.encode(), namespace)
    return owned


def test_keys_are_counted_by_tenant_and_found_by_namespace() -> None:
    owned = owned_of(a=ACME, b=SALTED, c=ACME, d=OTHER)
    assert owned.num_by_tenant == {"acme": 3, "other": 1}
    assert (sorted(owned.keys_of(ACME)), owned.keys_of(Namespace("m", "unknown"))) == ([b"a", b"c"], [])
    assert (owned.num_of(ACME), owned.num_of(Namespace("m", "unknown"))) == (2, 0)
    assert (len(owned), owned[b"b"], b"e" in owned) == (4, SALTED, False)


def test_a_namespace_without_keys_is_forgotten() -> None:
    owned = owned_of(a=ACME, d=OTHER)
    owned.remove(b"a")
    assert list(owned) == [OTHER]
    assert owned.num_by_tenant == {"other": 1}
    assert owned.page(0, None, 10).namespaces == (StoredNamespace(OTHER, 1),)


def test_pages_list_each_namespace_once_during_changes() -> None:
    owned = owned_of(a=ACME, b=SALTED, c=ACME, d=OTHER)
    first = owned.page(0, None, 2)
    assert first.namespaces == (StoredNamespace(ACME, 2), StoredNamespace(SALTED, 1))
    owned.remove(b"b")
    owned.add(b"b", SALTED)
    assert first.next_start is not None
    second = owned.page(first.next_start, None, 2)
    assert second.namespaces == (StoredNamespace(OTHER, 1), StoredNamespace(SALTED, 1)), (
        "SALTED was removed and added again, so it is the last one"
    )
    assert (second.next_start, second.num_namespaces) == (None, 3)


def test_a_page_of_a_tenant_passes_a_bounded_number_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_keys, "MAX_PASSED", 2)
    owned = owned_of(a=ACME, b=SALTED, d=OTHER)
    page = owned.page(0, "other", 10)
    assert (page.namespaces, page.num_compared) == ((), 0), (
        "the namespaces that were passed belong to others, so their number is not reported"
    )
    assert page.next_start is not None
    assert owned.page(page.next_start, "other", 10).namespaces == (StoredNamespace(OTHER, 1),)


def test_a_page_has_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_keys, "MAX_LISTED", 1)
    page = owned_of(a=ACME, d=OTHER).page(0, None, 10)
    assert (len(page.namespaces), page.next_start) == (1, 1)
