"""Lines between benchmark and worker come back as they were sent."""

from __future__ import annotations

import pytest

from bench.parts.peers.workers.task import Done, Ready, Task, from_line, to_line


def test_a_task_survives_its_line() -> None:
    task = Task([[1, 2], [3]], 5, 2, 1, fills_cache=True)
    assert Task.from_line(task.to_line()) == task
    assert task.to_line().count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("ready", Ready({"torch": "2"}, ["note\nwith a line"])),
        ("done", Done(1.5, [0.1], [[1]], [None])),
        ("error", "x"),
    ],
)
def test_answers_survive_their_lines(kind: str, value: Ready | Done | str) -> None:
    assert from_line(to_line(kind, value)) == value


@pytest.mark.parametrize("line", ["", "loading", "[]", '{"done": {}}', '{"other": 1}', '{"ready": {}, "error": ""}'])
def test_anything_else_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="expected a line with ready, done or error"):
        from_line(line)
