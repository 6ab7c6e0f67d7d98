"""Bodies of errors in OpenAI's API."""

from __future__ import annotations

import pytest

from radixkv.errors import InvalidRequest, InvariantViolation, LifecycleError, StepFailed
from radixkv.service.http.openai_responses import error_body

NAMES = {"token_ids": "prompt"}


def test_the_field_of_an_error_gets_its_name_in_the_api_of_openai() -> None:
    body = error_body(InvalidRequest("token_ids[2]: expected a token id, got -1"), NAMES)["error"]
    assert body["message"] == "prompt[2]: expected a token id, got -1"
    assert body["param"] == "prompt[2]"


@pytest.mark.parametrize("error", [InvariantViolation, StepFailed, LifecycleError, ValueError])
@pytest.mark.parametrize("names", [NAMES, {}])
def test_an_internal_error_has_no_text_of_its_own(error: type[Exception], names: dict[str, str]) -> None:
    body = error_body(error("block_pool: a count is wrong"), names)["error"]
    assert body["message"] == "internal error; the server's log has the cause"
    assert body["param"] is None
