import pytest

from radixkv.errors import InvalidRequest
from radixkv.service.server.segments.page_tokens import page_token, place_of


@pytest.mark.parametrize("place", [0, 1, 255, 2**40])
def test_a_token_is_read_by_the_service_that_made_it(place: int) -> None:
    assert place_of(page_token(7, place), 7) == place


def test_the_first_page_has_no_token_and_the_last_one_gives_none() -> None:
    assert place_of("", 7) == 0
    assert page_token(7, None) == ""


@pytest.mark.parametrize("token", ["x", "7", "7-", "8-1", "7-1-1", "7--1", "7-" + "1" * 13, " 7-1"])
def test_another_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidRequest, match="page_token: expected one that this service made"):
        place_of(token, 7)
