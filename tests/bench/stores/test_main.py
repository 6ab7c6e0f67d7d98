from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.stores.__main__ import main
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server


@pytest.mark.skipif(SERVER is None, reason=WHY_NOT)
def test_each_store_is_measured_with_its_peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "stores.json"
    with redis_server(tmp_path) as server:
        sizes = ["--payload-bytes", "5000", "--blocks", "20", "--rounds", "2", "--calls", "1"]
        assert main([*sizes, "--disk", str(tmp_path), "--redis", server.url, "--json", str(result)]) == 0
    rows = json.loads(result.read_text())["rows"]
    directions = [(row["name"], row["direction"]) for row in rows]
    disk = [("disk", direction) for direction in ("save", "load", "load cold")]
    assert directions == [("host", "save"), ("host", "load"), *disk, ("redis", "save"), ("redis", "load")]
    assert all(row["ratio"] > 0 for row in rows)
    is_verified = [row["verified_ratio"] is not None for row in rows]
    assert is_verified == [direction == ("disk", "load") for direction in directions]
    assert capsys.readouterr().out.count("| host |") == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
