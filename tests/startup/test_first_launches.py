"""No kernel is compiled while requests wait: requests launch only kernels that the startup has launched."""

import pytest

from . import traced_start
from .traced_start import Launches, TracedService


def trace_service(
    patch: pytest.MonkeyPatch,
    num_requests: int,
    *,
    kv_dtype: str = "auto",
    is_exact: bool = False,
    head_dim: int = 128,
    has_graphs: bool = False,
) -> Launches:
    """Start a traced service and let it serve requests. Returns its launches; those of requests are in phase "live"."""
    launches = Launches()
    with launches.traced():
        service = TracedService(
            patch, launches, is_exact=is_exact, kv_dtype=kv_dtype, head_dim=head_dim, has_graphs=has_graphs
        )
        launches.phase = "live"
        service.serve(num_requests)
    return launches


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8", "k8v4"])
def test_traffic_compiles_nothing(kv_dtype: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = trace_service(monkeypatch, 500, kv_dtype=kv_dtype, is_exact=is_exact)
    assert launches.new_in("live") == []
    assert launches.count > 500
    # The trial runs in a process of its own, and leaves compiled code on the disk for the service.
    assert launches.only_in("trial") == [], "the trial compiles only kernels that the service launches as well"


@pytest.mark.parametrize(("kv_dtype", "head_dim"), [("int8", 128), ("auto", 72)])
def test_traffic_with_captured_steps_compiles_nothing(
    kv_dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = trace_service(monkeypatch, 100, kv_dtype=kv_dtype, head_dim=head_dim, has_graphs=True)
    assert launches.new_in("live") == []


def test_traffic_compiles_kernels_that_the_start_did_not_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_start, "launch_all", lambda *_: None)
    launches = trace_service(monkeypatch, 100, kv_dtype="int8")
    assert {"_copy_span", "_attend_tile"} <= set(launches.new_in("live"))
