import pytest

from bench.parts import environment
from bench.parts.environment import describe_run


def test_outside_of_git_the_environment_names_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXKV_COMMIT", "abc")
    monkeypatch.setattr(environment, "current_commit", lambda directory: None)
    assert describe_run()["commit"] == "abc"
    monkeypatch.setattr(environment, "current_commit", lambda directory: "def")
    assert describe_run()["commit"] == "def"
