import re

from radixkv.service.cli.purge import purge_table
from radixkv.v1.cache_pb2 import DeletedBlocks, PurgeResponse
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine


def test_purge_prints_what_it_freed(capsys):
    engine = FakeEngine()
    code, out, _ = run_cli(capsys, engine, "purge", "--tenant", "acme", "--salt", "")
    assert (code, engine.purges) == (0, [("acme", None, "")])
    assert re.search(r"^blocks freed +7$", out, re.MULTILINE)
    assert re.search(r"^  still in use +2$", out, re.MULTILINE)
    code, _, err = run_cli(capsys, engine, "purge")
    assert (code, err) == (
        2,
        "radixkv: purge: expected either --all, or one or more of --tenant, --adapter, --salt\n",
    )
    assert run_cli(capsys, engine, "purge", "--all", "--tenant", "acme")[0] == 2
    assert run_cli(capsys, engine, "purge", "--all", "--json")[0] == 0
    assert engine.purges[1:] == [(None, None, None)]


def test_a_purge_table_has_the_deleted_blocks_of_each_store():
    stores = [DeletedBlocks(store="disk", blocks=0), DeletedBlocks(store="redis")]
    lines = purge_table(PurgeResponse(freed_blocks=2, stores=stores)).splitlines()
    assert [line.split(maxsplit=3) for line in lines[2:]] == [
        ["deleted", "in", "disk", "0 blocks"],
        ["deleted", "in", "redis", "not reachable; the purge will be retried"],
    ]
