import pytest

from radixkv.errors import InvalidRequest
from radixkv.namespace import Namespace
from radixkv.service.server.opaque_ids import NamespaceIds, PageTokens, SegmentIds


def test_an_id_distinguishes_namespaces_and_differs_in_each_service():
    ids, other = NamespaceIds(), NamespaceIds()
    names = [Namespace("m", "a", "", "bc"), Namespace("m", "ab", "", "c"), Namespace("m", "a"), Namespace("n", "a")]
    assert len({ids.of(name) for name in names}) == 4
    assert ids.of(Namespace("m", "a")) == ids.of(names[2]) < 2**48
    assert [ids.of(name) for name in names] != [other.of(name) for name in names]


@pytest.mark.parametrize("place", [0, 1, 255, 2**40])
def test_a_token_is_read_by_the_service_that_made_it(place: int) -> None:
    tokens = PageTokens(7)
    assert tokens.position_of(tokens.token(place)) == place
    assert PageTokens(7).position_of(tokens.token(place)) == place, "that of a server which takes over"


def test_the_first_page_has_no_token_and_the_last_one_gives_none() -> None:
    tokens = PageTokens(7)
    assert tokens.position_of("") == 0
    assert tokens.token(None) == ""


def test_a_token_does_not_reveal_its_position() -> None:
    tokens = PageTokens(7)
    issued = [tokens.token(place) for place in (1, 2, 3)]
    assert {len(token) for token in issued} == {32}
    assert len({token[:16] for token in issued}) == len({token[16:] for token in issued}) == 3
    assert not {token[start : start + 16] for token in issued for start in (0, 16)} & {
        place.to_bytes(8, "little").hex() for place in (1, 2, 3)
    }
    for other in (PageTokens(8), PageTokens(7, b"another secret")):
        assert not set(issued) & {other.token(place) for place in (1, 2, 3)}


def test_another_token_is_refused() -> None:
    tokens = PageTokens(7)
    own = tokens.token(7)
    changed = f"{int(own, 16) ^ 1:032x}"
    for token in ("x", "7", "00", own[:-2], own + "00", changed, own[16:] + own[:16], PageTokens(8).token(7)):
        with pytest.raises(InvalidRequest, match="page_token: this service did not make it"):
            tokens.position_of(token)


def test_an_id_belongs_to_a_position_and_reveals_nothing_about_it():
    ids, again, other = SegmentIds(b"secret"), SegmentIds(b"secret"), SegmentIds(b"another")
    numbers = [ids.of(place) for place in range(10_000)]
    assert len(set(numbers)) == 10_000
    assert all(0 < number < 2**53 for number in numbers)
    assert numbers == [again.of(place) for place in range(10_000)]
    assert not set(numbers) & {other.of(place) for place in range(10_000)}
    assert numbers != sorted(numbers)


def test_no_segment_has_the_number_zero():
    assert SegmentIds().of(None) == 0


def test_servers_of_one_process_return_the_same_numbers():
    assert SegmentIds().of(7) == SegmentIds().of(7)
