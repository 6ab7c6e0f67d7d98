"""The causes of misses of a whole server: the embedded model, its tokenizer and the real cache."""

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
    # With this share, every miss is examined, however slow the machine is.
    with (
        serving("--set", "server.diagnosed_share=0.5") as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client,
    ):
        yield client


def diagnosed(client: Client, tenant: str, num_misses: int) -> DiagnoseResponse:
    """Return the misses of a tenant when they have been examined."""

    def found() -> bool:
        return client.diagnose(tenant=tenant).examined_misses >= num_misses

    wait_until(found)
    return client.diagnose(tenant=tenant)


def cause_of(response: DiagnoseResponse, name: str) -> DiagnosedCause:
    (cause,) = (each for each in response.causes if each.cause == name)
    return cause


def test_an_id_in_the_first_line_is_found_with_both_texts_and_what_it_costs(client: Client) -> None:
    rng = random.Random(1)
    computed = []
    for number in range(6):
        text = f"build {rng.getrandbits(64):016x}\n{BODY}\nquestion {number}"
        computed.append(client.prefill(text, tenant="ids").usage.computed_tokens)
    found = diagnosed(client, "ids", 6)
    cause = cause_of(found, "RANDOM_ID")
    assert (found.prompts, found.misses, found.examined_misses, found.first_prompts) == (6, 6, 6, 1)
    assert found.missed_tokens == found.examined_tokens == sum(computed)
    assert (cause.tenant, cause.prompts, cause.pattern) == ("ids", 5, "16 hexadecimal digits")
    assert cause.sample.before_text.startswith("build")
    # What was lost is what a prompt with the id of another one reuses.
    body_tokens = len(client.tokenizer().encode(f"\n{BODY}\nquestion "))
    assert cause.lost_tokens == pytest.approx(5 * body_tokens, rel=0.01)
    assert cause.lost_s > 0


def test_salts_are_found_and_other_tenants_see_nothing(client: Client) -> None:
    for number in range(3):
        client.prefill(BODY, tenant="salted", salt=str(number))
    found = diagnosed(client, "salted", 3)
    assert [(each.cause, each.prompts) for each in found.causes] == [("SALT_CHANGED", 2)]
    client.prefill(BODY, tenant="stranger")
    stranger = diagnosed(client, "stranger", 1)
    assert (len(stranger.causes), stranger.first_prompts) == (0, 1)


def test_hits_have_no_cause(client: Client) -> None:
    for _ in range(3):
        client.prefill(BODY, tenant="hits")
    found = diagnosed(client, "hits", 1)
    assert (found.prompts, found.misses, len(found.causes)) == (3, 1, 0)
    assert found.cached_tokens == 2 * (found.prompt_tokens // 3 - 1)


def test_a_purge_removes_the_misses_of_a_tenant(client: Client) -> None:
    for number in range(2):
        client.prefill(BODY, tenant="purged", salt=str(number))
    assert diagnosed(client, "purged", 2).causes
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
    assert diagnosed(client, "released", 2).misses == 2


def test_the_causes_of_salted_prompts_have_no_text(client: Client) -> None:
    for number in range(2):
        client.prefill(f"secret {random.Random(number).getrandbits(64):016x} {BODY}", tenant="users", salt="one")
    found = diagnosed(client, "users", 2)
    assert [(each.cause, each.HasField("sample")) for each in found.causes] == [("RANDOM_ID", False)]


def test_prompts_that_are_generated_in_a_session_are_compared(client: Client) -> None:
    """The second turn changes the beginning of the first, and the answer in between is cached as well."""
    first = f"Now: 2026-11-28T10:00:00Z. {BODY}"
    answer = "".join(each.text for each in client.generate(first, max_new_tokens=8, tenant="s", session_id="1"))
    second = f"Now: 2026-11-28T10:00:31Z. {BODY}{answer} and more"
    client.prefill(second, tenant="s", session_id="1")
    assert [each.cause for each in diagnosed(client, "s", 2).causes] == ["DATE_OR_TIME"]
