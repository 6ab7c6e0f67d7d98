import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.server.segments.page_tokens import PageTokens


@pytest.mark.parametrize("place", [0, 1, 255, 2**40])
def test_a_token_is_read_by_the_service_that_made_it(place: int) -> None:
    tokens = PageTokens(7)
    assert tokens.place_of(tokens.token(place)) == place
    assert PageTokens(7).place_of(tokens.token(place)) == place, "that of a server which takes over"


def test_the_first_page_has_no_token_and_the_last_one_gives_none() -> None:
    tokens = PageTokens(7)
    assert tokens.place_of("") == 0
    assert tokens.token(None) == ""


def test_a_token_does_not_show_its_place() -> None:
    tokens = PageTokens(7)
    told = [tokens.token(place) for place in (1, 2, 3)]
    assert {len(token) for token in told} == {32}
    assert len({token[:16] for token in told}) == len({token[16:] for token in told}) == 3
    assert not {token[start : start + 16] for token in told for start in (0, 16)} & {
        place.to_bytes(8, "little").hex() for place in (1, 2, 3)
    }
    for other in (PageTokens(8), PageTokens(7, b"another secret")):
        assert not set(told) & {other.token(place) for place in (1, 2, 3)}


def test_another_token_is_refused() -> None:
    tokens = PageTokens(7)
    own = tokens.token(7)
    changed = f"{int(own, 16) ^ 1:032x}"
    for token in ("x", "7", "00", own[:-2], own + "00", changed, own[16:] + own[:16], PageTokens(8).token(7)):
        with pytest.raises(InvalidRequest, match="page_token: expected one that this service made"):
            tokens.place_of(token)
