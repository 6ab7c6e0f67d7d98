from radixkv.namespace import Namespace
from radixkv.service.server.segments.namespace_ids import NamespaceIds


def test_a_number_tells_namespaces_apart_and_differs_in_each_service():
    ids, other = NamespaceIds(), NamespaceIds()
    names = [Namespace("m", "a", "", "bc"), Namespace("m", "ab", "", "c"), Namespace("m", "a"), Namespace("n", "a")]
    assert len({ids.of(name) for name in names}) == 4
    assert ids.of(Namespace("m", "a")) == ids.of(names[2]) < 2**48
    assert [ids.of(name) for name in names] != [other.of(name) for name in names]
