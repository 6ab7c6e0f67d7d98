"""A short form of the control: an empty handler serves a well-behaved client during a burst."""

import json

import pytest

from bench.hostile import control

pytestmark = pytest.mark.usefixtures("forked_servers")


@pytest.mark.long
def test_an_empty_handler_answers_during_a_burst(tmp_path, capsys):
    file = tmp_path / "control.json"
    # With a low priority, the attacker might get no CPU time.
    options = ["--attacks", "cancels", "--seconds", "0.5", "--equal-priority"]
    control.main([*options, "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["attack"], row["under_attack"]["calls"], row["under_attack"]["refusals"]) == ("cancels", 10, 0)
    assert row["observed"]
    assert capsys.readouterr().out.startswith("cancels")
