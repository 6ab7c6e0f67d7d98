import json
from pathlib import Path

import pytest

from bench.parts.result_file import write_json, write_result


def test_json_replaces_the_old_file_and_leaves_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "replay.json"
    file.write_text("old")
    write_json(file, {"a": 1})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_a_result_that_is_not_json_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "replay.json"
    file.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(file, {"a": [1, float("nan")]})
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_result_is_written_with_the_description_of_its_run(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "rpc.json"
    write_result(file, "bench.rpc", ["--rounds", "2"], {"rows": [1]})
    written = json.loads(file.read_text())
    assert (written["rows"], written["command"]) == ([1], "python -m bench.rpc --rounds 2")
    assert {"commit", "date", "machine", "versions"} <= written.keys()
    write_result(None, "bench.rpc", [], {})
