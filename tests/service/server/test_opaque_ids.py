import pytest

from radixkv.errors import InvalidRequest
from radixkv.namespace import Namespace
from radixkv.service.server.opaque_ids import NamespaceIds, PageTokens, SegmentIds


def test_an_id_distinguishes_namespaces_and_differs_in_each_service():
    ids, other = NamespaceIds(), NamespaceIds()
    plain = Namespace("m", "a")
    namespaces = [plain, Namespace("m", "a", "", "bc"), Namespace("m", "ab", "", "c"), Namespace("n", "a")]
    assert len({ids.of(each) for each in namespaces}) == 4
    assert ids.of(Namespace("m", "a")) == ids.of(plain) < 2**48
    assert [ids.of(each) for each in namespaces] != [other.of(each) for each in namespaces]


@pytest.mark.parametrize("position", [0, 1, 255, 2**40])
def test_a_token_is_read_by_the_service_that_made_it_or_has_its_epoch(position: int) -> None:
    tokens = PageTokens(7)
    assert tokens.position_of(tokens.token(position)) == position
    assert PageTokens(7).position_of(tokens.token(position)) == position


def test_the_first_page_has_no_token_and_the_last_one_gives_none() -> None:
    tokens = PageTokens(7)
    assert tokens.position_of("") == 0
    assert tokens.token(None) == ""


def test_a_token_does_not_reveal_its_position() -> None:
    tokens = PageTokens(7)
    issued = [tokens.token(position) for position in (1, 2, 3)]
    assert {len(token) for token in issued} == {32}
    assert len({token[:16] for token in issued}) == len({token[16:] for token in issued}) == 3
    assert not {token[start : start + 16] for token in issued for start in (0, 16)} & {
        position.to_bytes(8, "little").hex() for position in (1, 2, 3)
    }
    for other in (PageTokens(8), PageTokens(7, b"another secret")):
        assert not set(issued) & {other.token(position) for position in (1, 2, 3)}


def test_altered_tokens_and_those_of_another_epoch_are_refused() -> None:
    tokens = PageTokens(7)
    own = tokens.token(7)
    changed = f"{int(own, 16) ^ 1:032x}"
    for token in ("x", "7", "00", own[:-2], own + "00", changed, own[16:] + own[:16], PageTokens(8).token(7)):
        with pytest.raises(InvalidRequest, match="page_token: this service did not make it"):
            tokens.position_of(token)


def test_a_segment_id_belongs_to_a_place_and_reveals_nothing_about_it():
    places = range(10_000)
    ids, same_secret, other_secret = SegmentIds(b"secret"), SegmentIds(b"secret"), SegmentIds(b"another")
    numbers = [ids.of(place) for place in places]
    assert len(set(numbers)) == len(places)
    assert all(0 < number < 2**53 for number in numbers)
    assert numbers == [same_secret.of(place) for place in places]
    assert not set(numbers) & {other_secret.of(place) for place in places}
    assert numbers != sorted(numbers)


def test_the_id_of_no_segment_is_zero():
    assert SegmentIds().of(None) == 0


def test_servers_of_one_process_return_the_same_segment_ids():
    assert SegmentIds().of(7) == SegmentIds().of(7)
