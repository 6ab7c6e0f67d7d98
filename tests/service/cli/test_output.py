import json

from google.protobuf.timestamp_pb2 import Timestamp

from radixkv.service.cli.output import json_of, prefill_table, purge_table, stats_table
from radixkv.v1.cache_pb2 import (
    BlockStats,
    DeletedBlocks,
    PartStats,
    PurgeResponse,
    ReplicaStats,
    RequestStats,
    StateStats,
    StatsResponse,
    TenantStats,
    TierStats,
    TokenStats,
)
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


def test_a_stats_table_shows_every_number():
    stats = StatsResponse(
        model="m",
        device="d",
        uptime_s=101.0,
        block_size=102,
        blocks=BlockStats(
            total=103, free=104, leased=105, published=106, pinned=107, retained=117, retainable=118, on_probation=123
        ),
        requests=RequestStats(waiting=108, running=109, following=122, finished=110, failed=111, cancelled=112),
        tokens=TokenStats(prompt=400, cached=114, computed=115, written=116),
        namespaces=117,
        segments=118,
        held_leases=119,
        evicted_blocks=120,
        evicted_probation_blocks=124,
        block_bytes=121,
        kv_dtype="k8v4",
        model_fingerprint="0a1b2c",
    )
    table = stats_table(stats)
    assert "0a1b2c" in table
    for number in (*range(101, 113), 400, *range(114, 125)):  # all numbers above
        assert str(number) in table, number
    assert "(28.5 %)" in table  # 114 of 400 prompt tokens are cached
    assert "121 bytes each, k8v4" in table


def test_a_stats_table_shows_snapshots_where_there_are_states():
    stats = StatsResponse(requests=RequestStats())
    assert "snapshots" not in stats_table(stats)
    stats.states.CopyFrom(StateStats(snapshots=301, max_snapshots=302, given_up_snapshots=303, recomputed_tokens=304))
    table = stats_table(stats)
    assert "301 of at most 302" in table
    for number in (303, 304):
        assert str(number) in table, number


def test_a_stats_table_shows_parts_where_windowed_layers_have_a_pool():
    stats = StatsResponse(requests=RequestStats())
    assert "windowed" not in stats_table(stats)
    stats.parts.CopyFrom(PartStats(free=301, needed=302, kept=303, given_up=304, shortened_hits=305, lost_tokens=306))
    table = stats_table(stats)
    assert "302 needed, 303 kept, 301 free" in table
    assert "305, by 306 tokens" in table
    assert "304" in table


def test_a_stats_table_shows_each_tier_and_whether_it_works():
    stats = StatsResponse()
    stats.tiers.add(tier="host", is_working=True, blocks=201, used_bytes=202, loaded_blocks=203, missed_blocks=204)
    stats.tiers.add(tier="disk", saved_blocks=205)
    host, disk = (line for line in stats_table(stats).splitlines() if line.startswith("tier "))
    assert host.split(maxsplit=2)[2] == "201 blocks, 202 bytes; 203 loaded, 204 missed, 0 saved"
    assert disk.endswith("205 saved, disabled")


def test_a_name_cannot_control_the_terminal():
    stats = StatsResponse()
    stats.tenants.add(tenant="a\x1b[2J\nb")
    stats.tenants.add(tenant="Zoë")
    *_, first, second = stats_table(stats).splitlines()
    assert first.startswith(r"tenant a\x1b[2J\nb ")
    assert second.startswith("tenant Zoë ")


def test_a_table_of_zeros_does_not_divide_by_zero():
    assert "%" not in stats_table(StatsResponse())


def test_a_stats_table_shows_the_tiers_below_the_device():
    tiers = [TierStats(tier="host", is_working=True, blocks=4, used_bytes=5), TierStats(tier="redis", loaded_blocks=6)]
    tenant = TenantStats(tenant="acme", cached_blocks=3, stored_blocks={"host": 4, "redis": 0})
    table = stats_table(StatsResponse(tiers=tiers, tenants=[tenant]))
    assert "4 blocks, 5 bytes; 0 loaded" in table
    assert "6 loaded, 0 missed, 0 saved, disabled" in table
    assert "3 blocks, 4 in host, 0 cached tokens" in table


def test_a_purge_table_has_the_deleted_blocks_of_each_store():
    stores = [DeletedBlocks(store="disk", blocks=0), DeletedBlocks(store="redis")]
    lines = purge_table(PurgeResponse(freed_blocks=2, stores=stores)).splitlines()
    assert [line.split(maxsplit=3) for line in lines[2:]] == [
        ["deleted", "in", "disk", "0 blocks"],
        ["deleted", "in", "redis", "not reachable; the purge will be retried"],
    ]
