"""A server with the embedded model, its tokenizer and the real cache finds the causes of misses."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from radixkv.service.client import Client
from radixkv.v1.cache_pb2 import DiagnosedCause, DiagnoseResponse
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving

BODY = " ".join(f"Rule {number}: be kind to the reader of line {number}." for number in range(20))


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    # The examination of misses may take this share of the time of the steps, which suffices for every miss on a slow
    # machine too.
    with (
        serving("--set", "server.diagnosed_share=0.5") as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        yield client


def wait_for_diagnosis(client: Client, tenant: str, num_misses: int) -> DiagnoseResponse:
    """Wait until a number of misses of a tenant has been examined, and return their causes."""
    wait_until(lambda: client.diagnose(tenant=tenant).examined_misses >= num_misses)
    return client.diagnose(tenant=tenant)


def cause_of(diagnosis: DiagnoseResponse, name: str) -> DiagnosedCause:
    (cause,) = (each for each in diagnosis.causes if each.cause == name)
    return cause


def test_an_id_in_the_first_line_is_found_with_both_texts_and_what_it_costs(client: Client) -> None:
    rng = random.Random(1)
    num_computed = []
    for number in range(6):
        text = f"build {rng.getrandbits(64):016x}\n{BODY}\nquestion {number}"
        num_computed.append(client.prefill(text, tenant="ids").usage.computed_tokens)
    diagnosis = wait_for_diagnosis(client, "ids", 6)
    cause = cause_of(diagnosis, "RANDOM_ID")
    assert (diagnosis.prompts, diagnosis.misses, diagnosis.examined_misses, diagnosis.first_prompts) == (6, 6, 6, 1)
    assert diagnosis.missed_tokens == diagnosis.examined_tokens == sum(num_computed)
    assert (cause.tenant, cause.prompts, cause.pattern) == ("ids", 5, "16 hexadecimal digits")
    assert cause.sample.before_text.startswith("build")
    # Each prompt but the first lost the tokens that it would have reused if its id had been that of an earlier prompt.
    body_tokens = len(client.tokenizer().encode(f"\n{BODY}\nquestion "))
    assert cause.lost_tokens == pytest.approx(5 * body_tokens, rel=0.01)
    assert cause.lost_s > 0


def test_salts_are_found_and_other_tenants_see_nothing(client: Client) -> None:
    for number in range(3):
        client.prefill(BODY, tenant="salted", salt=str(number))
    diagnosis = wait_for_diagnosis(client, "salted", 3)
    assert [(each.cause, each.prompts) for each in diagnosis.causes] == [("SALT_CHANGED", 2)]
    client.prefill(BODY, tenant="stranger")
    stranger = wait_for_diagnosis(client, "stranger", 1)
    assert (len(stranger.causes), stranger.first_prompts) == (0, 1)


def test_hits_have_no_cause(client: Client) -> None:
    for _ in range(3):
        client.prefill(BODY, tenant="hits")
    diagnosis = wait_for_diagnosis(client, "hits", 1)
    assert (diagnosis.prompts, diagnosis.misses, len(diagnosis.causes)) == (3, 1, 0)
    tokens_per_prompt = diagnosis.prompt_tokens // 3
    assert diagnosis.cached_tokens == 2 * (tokens_per_prompt - 1), "two of three prompts except for their last token"


def test_a_purge_removes_the_misses_of_a_tenant(client: Client) -> None:
    for number in range(2):
        client.prefill(BODY, tenant="purged", salt=str(number))
    assert wait_for_diagnosis(client, "purged", 2).causes
    client.prefill(BODY, tenant="other")
    client.purge(tenant="purged")
    assert client.diagnose(tenant="purged").prompts == 0
    assert client.diagnose(tenant="other").prompts == 1


def test_a_purge_removes_the_misses_of_a_tenant_that_has_nothing_cached(client: Client) -> None:
    for number in range(2):
        client.prefill(BODY, tenant="gone", salt=str(number), write_cache=False)
    assert client.diagnose(tenant="gone").misses == 2
    client.purge(tenant="gone")
    assert client.diagnose(tenant="gone").prompts == 0


def test_a_hint_that_releases_a_prompt_keeps_the_misses(client: Client) -> None:
    for number in range(2):
        client.prefill(f"{number} {BODY}", tenant="released")
    client.hint([{"action_type": "kv.release"}], client.tokenizer().encode(f"1 {BODY}"), tenant="released")
    assert wait_for_diagnosis(client, "released", 2).misses == 2


def test_the_causes_of_salted_prompts_have_no_text(client: Client) -> None:
    for number in range(2):
        client.prefill(f"secret {random.Random(number).getrandbits(64):016x} {BODY}", tenant="users", salt="one")
    diagnosis = wait_for_diagnosis(client, "users", 2)
    assert [(each.cause, each.HasField("sample")) for each in diagnosis.causes] == [("RANDOM_ID", False)]


def test_the_prompts_of_completions_in_a_session_are_compared(client: Client) -> None:
    """The second prompt continues the first and its cached answer, but the time at its beginning has changed."""
    first = f"Now: 2026-11-28T10:00:00Z. {BODY}"
    answer = "".join(each.text for each in client.generate(first, max_new_tokens=8, tenant="s", session_id="1"))
    second = f"Now: 2026-11-28T10:00:31Z. {BODY}{answer} and more"
    client.prefill(second, tenant="s", session_id="1")
    assert [each.cause for each in wait_for_diagnosis(client, "s", 2).causes] == ["DATE_OR_TIME"]
