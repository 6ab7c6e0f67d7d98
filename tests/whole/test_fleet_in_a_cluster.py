"""A fleet that joins an existing Ray cluster, with TLS between replicas and tokens for clients."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile

import grpc
import pytest

from tests.free_port import free_port

pytest.importorskip("ray", reason="the extra ray is not installed")

from bench.fleet.processes import listener_of
from bench.parts.peers.process_tree import descendants
from radixkv.service.client import Client, KVSource
from tests.patience import PATIENCE_S, wait_until
from tests.service.fleet.fleet_process import command_of, running_fleet
from tests.service.server.auth.certificates import CredentialFiles

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def run_ray_head():
    """Run a Ray node on loopback; yield its address and process id. Afterwards, stop the node and its processes."""
    port = free_port()
    flags = ["--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=4"]
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as directory:
        environment = {**os.environ, "RAY_TMPDIR": directory, "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--include-dashboard=false", *flags]
        command += ["--disable-usage-stats", "--object-store-memory=83886080", f"--temp-dir={directory}"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, start_new_session=True) as head:
            try:
                wait_until(
                    lambda: head.poll() is None and any("raylet" in command_of(pid) for pid in descendants(head.pid))
                )
                yield f"127.0.0.1:{port}", head.pid
            finally:
                started_pids = descendants(head.pid)
                head.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    head.wait(10)
                head.kill()
                for pid in started_pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def test_a_fleet_joins_a_cluster_and_its_replicas_use_tls(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # the machine's address is loopback
    credential_files, ids = CredentialFiles(tmp_path), [*range(200)]
    settings = [f"server.{key}={value}" for key, value in credential_files.tls.items()]
    settings += [f"fleet.tls_ca={credential_files.ca_file}", "fleet.tls_name=localhost", "fleet.least_match_tokens=64"]
    options = [argument for setting in settings for argument in ("--set", setting)]
    acme, boss = credential_files.client("acme"), credential_files.client("boss")
    with run_ray_head() as (ray_address, head_pid):
        fleet_options = ["--ray-address", ray_address, "--replica-host", "node", "--replicas", "2"]
        with (
            running_fleet(*fleet_options, *options, log=tmp_path / "log") as fleet,
            Client(fleet.address, **acme) as client,
        ):
            wait_until(lambda: client.route(ids).num_replicas == 2)
            assert client.prefill(ids).usage.cached_tokens == 0
            wait_until(lambda: client.route(ids).cached_tokens >= 192)  # events were received over TLS
            caching_replica = client.route(ids).address
            assert listener_of(caching_replica, descendants(head_pid)), "the replica is a process of that cluster"
            with Client(caching_replica, timeout_s=PATIENCE_S, **acme) as replica:
                held = replica.prefill(ids, hold_lease=True)
                source = KVSource(address=caching_replica, lease_id=held.lease_id, epoch=held.epoch)
                generated_elsewhere = list(client.generate(ids, kv_source=source, max_new_tokens=5))
                generated_there = list(replica.generate(ids, max_new_tokens=5))
            assert [chunk.token_ids for chunk in generated_elsewhere] == [chunk.token_ids for chunk in generated_there]
            assert generated_elsewhere[0].usage.remote_tokens >= 192, "one replica fetched from the other, over TLS"
            for credentials, code in (
                ({"tls_ca": credential_files.ca_file}, grpc.StatusCode.UNAUTHENTICATED),
                ({}, grpc.StatusCode.UNAVAILABLE),
            ):
                with Client(caching_replica, timeout_s=PATIENCE_S, **credentials) as stranger:
                    with pytest.raises(grpc.RpcError) as refused:
                        stranger.prefill(ids)
                    assert refused.value.code() is code
            with Client(fleet.address, timeout_s=PATIENCE_S, **boss) as admin:
                assert len(admin.stats().replicas) == 2
