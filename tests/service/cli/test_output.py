import json

from google.protobuf.timestamp_pb2 import Timestamp

from radixkv.service.cli.output import json_of, prefill_table
from radixkv.v1.cache_pb2 import BlockStats, ReplicaStats, RequestStats, StatsResponse, TenantStats
from radixkv.v1.prefill_pb2 import DIVERGED, PrefillResponse, Timing, TokenLogprob, Usage

ANSWER = PrefillResponse(
    request_id="r",
    usage=Usage(prompt_tokens=8, cached_tokens=6, computed_tokens=2, written_tokens=2),
    next_token_id=7,
    top_logprobs=[TokenLogprob(token_id=7, logprob=-0.1)],
    miss_reason=DIVERGED,
    timing=Timing(queue_us=1500, prefill_us=2**53 + 1, total_us=3),
)


def field_names(descriptor):
    return {field.name for field in descriptor.fields}


def test_64_bit_numbers_are_numbers_and_exact():
    tree = json.loads(json_of(ANSWER))
    assert tree["timing"]["prefill_us"] == 2**53 + 1
    assert tree["usage"]["prompt_tokens"] == 8


def test_an_epoch_is_a_string_in_every_response():
    epoch = 5178039562246197298
    assert json.loads(json_of(PrefillResponse(epoch=epoch)))["epoch"] == str(epoch)
    stats = StatsResponse(replicas=[ReplicaStats(stats=StatsResponse(epoch=epoch))])
    tree = json.loads(json_of(stats))
    assert (tree["epoch"], tree["replicas"][0]["stats"]["epoch"]) == ("0", str(epoch))


def test_statistics_hidden_from_a_tenant_are_missing_and_not_0():
    acme_stats = StatsResponse(blocks=BlockStats(total=10), tenants=[TenantStats(tenant="acme")], block_size=64)
    tree = json.loads(json_of(acme_stats))
    assert tree["blocks"] == {"total": 10}
    assert set(tree) == {
        *("model", "device", "epoch", "uptime_s", "block_size", "block_bytes", "kv_dtype", "model_fingerprint"),
        *("blocks", "tenants", "replicas", "sessions"),
    }
    assert tree["tenants"][0]["cached_blocks"] == 0
    fleet = StatsResponse(
        replicas=[ReplicaStats(address="a", stats=acme_stats), ReplicaStats(address="b", error="gone")]
    )
    replicas = json.loads(json_of(fleet))["replicas"]
    assert replicas[0]["stats"]["blocks"] == {"total": 10}
    assert "known_tenants" not in replicas[0]["stats"]
    assert replicas[1] == {"address": "b", "error": "gone"}
    everything = json.loads(json_of(StatsResponse(requests=RequestStats(), blocks=BlockStats(total=10))))
    assert (everything["blocks"]["free"], everything["known_tenants"], everything["tiers"]) == (0, 0, [])


def test_names_are_those_of_the_proto_and_all_plain_fields_are_there():
    tree = json.loads(json_of(ANSWER))
    assert set(tree) == field_names(ANSWER.DESCRIPTOR) - {"explanation", "lease_expires_at", "retained"}
    assert set(tree["usage"]) == field_names(ANSWER.usage.DESCRIPTOR)
    assert tree["miss_reason"] == "DIVERGED"
    assert tree["block_table"] == []
    assert tree["top_logprobs"] == [{"token_id": 7, "logprob": -0.1}]


def test_a_time_is_a_string():
    tree = json.loads(json_of(PrefillResponse(lease_expires_at=Timestamp(seconds=1))))
    assert tree["lease_expires_at"] == "1970-01-01T00:00:01Z"


def test_a_prefill_table_says_what_was_reused_and_why():
    rows = (line.rsplit("  ", 1) for line in prefill_table(ANSWER).splitlines())
    values = {name.strip(): value for name, value in rows}
    assert values["cached"] == "6 tokens (75.0 %)"
    assert values["computed"] == "2 tokens"
    assert values["miss reason"] == "DIVERGED"
    assert values["next token"] == "7"
    assert values["queue"] == "1.50 ms"
    assert values["logprob of 7"] == "-0.1000"


def test_a_table_says_what_was_not_on_the_device():
    usage = Usage(prompt_tokens=8, cached_tokens=6, device_tokens=1, host_tokens=2, remote_tokens=3)
    assert "6 tokens (75.0 %), 2 from host memory, 3 from shared stores\n" in prefill_table(
        PrefillResponse(usage=usage)
    )
