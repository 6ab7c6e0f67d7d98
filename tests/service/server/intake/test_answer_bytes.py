import pytest

from radixkv.service.server.intake.answer_bytes import answer_bytes
from radixkv.v1.cache_pb2 import StatsRequest
from radixkv.v1.prefill_pb2 import PrefillRequest


@pytest.mark.parametrize(
    ("request_", "num_bytes"),
    [(PrefillRequest(return_logits=True), 3 * 4 * 1000), (PrefillRequest(), 0), (StatsRequest(), 0)],
)
def test_logits_count_three_times_and_other_answers_only_once_they_are_there(request_, num_bytes):
    assert answer_bytes(request_, 1000) == num_bytes
