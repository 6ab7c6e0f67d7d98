"""The limit of open files is raised if possible; otherwise it limits the connections."""

from __future__ import annotations

import resource

import pytest

from radixkv.config import ServerConfig
from radixkv.service.server import open_files
from radixkv.service.server.open_files import RESERVED_FILES, max_connections, raise_open_file_limit

INFINITY = resource.RLIM_INFINITY


class Limits:
    """Stands in for the limits of open files of the process. Without `is_raised`, the system refuses to raise them."""

    def __init__(self, soft: int, hard: int, *, is_raised: bool = True) -> None:
        self.soft, self.hard, self._is_raised = soft, hard, is_raised

    def get(self, kind: int) -> tuple[int, int]:
        assert kind == resource.RLIMIT_NOFILE
        return self.soft, self.hard

    def set(self, kind: int, limits: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        if not self._is_raised:
            raise ValueError("current limit exceeds maximum limit")
        self.soft, self.hard = limits


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch):
    """A function that replaces the limits of the process."""

    def limit(limits: Limits) -> Limits:
        monkeypatch.setattr(open_files.resource, "getrlimit", limits.get)
        monkeypatch.setattr(open_files.resource, "setrlimit", limits.set)
        return limits

    return limit


@pytest.mark.parametrize("hard", [50_000, INFINITY])
def test_the_limit_is_raised_to_what_the_connections_need(limited, caplog, hard) -> None:
    limits = limited(Limits(1024, hard))
    config = ServerConfig()
    raise_open_file_limit(config)
    assert (limits.soft, limits.hard) == (config.max_connections + RESERVED_FILES, hard)
    assert max_connections(config) == config.max_connections
    assert not caplog.text


def test_the_limit_of_open_files_covers_the_connections_of_each_port(limited) -> None:
    limits = limited(Limits(1024, INFINITY))
    config = ServerConfig(metrics_port=0, http_port=0, admin_port=0)
    raise_open_file_limit(config)
    assert limits.soft == 3 * config.max_connections + RESERVED_FILES
    assert max_connections(config) == config.max_connections
    limited(Limits(RESERVED_FILES + 3 * 1000, RESERVED_FILES + 3 * 1000))
    assert max_connections(config) == 1000


@pytest.mark.parametrize("soft", [50_000, INFINITY])
def test_a_sufficient_limit_is_kept(limited, caplog, soft) -> None:
    limits = limited(Limits(soft, soft))
    raise_open_file_limit(ServerConfig())
    assert limits.soft == soft
    assert max_connections(ServerConfig()) == 16_384
    assert not caplog.text


@pytest.mark.parametrize(
    ("limits", "raised", "accepted"),
    [
        (Limits(1024, 1024), 1024, 512),  # at most half of the files are reserved
        (Limits(256, 4096), 4096, 4096 - RESERVED_FILES),
        (Limits(1024, 65_536, is_raised=False), 1024, 512),
    ],
    ids=["fixed", "raised in part", "refused"],
)
def test_fewer_connections_are_accepted_than_configured_with_a_warning(
    limited, caplog, limits, raised, accepted
) -> None:
    limited(limits)
    raise_open_file_limit(ServerConfig())
    assert limits.soft == raised
    assert max_connections(ServerConfig()) == accepted
    assert "server.max_connections: expected a limit of at least 17408 open files" in caplog.text
    assert (
        f"got {raised}, so at most {accepted} connections are accepted on each port; raise the limit (LimitNOFILE="
        in caplog.text
    )


def test_a_few_connections_need_no_warning(limited, caplog) -> None:
    limited(Limits(1024, 1024))
    raise_open_file_limit(ServerConfig(max_connections=500))
    assert max_connections(ServerConfig(max_connections=500)) == 500
    assert not caplog.text
