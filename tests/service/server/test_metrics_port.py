import contextlib
import json
import re
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from radixkv.config import Config
from radixkv.errors import ConfigError
from radixkv.scheduling.request import Outcome
from radixkv.service.cli.main import main
from radixkv.service.client import Client
from radixkv.service.server import metrics_port
from radixkv.service.server.metrics_port import Telemetry
from tests.patience import PATIENCE_S
from tests.service.command_line import LAUNCHER, fake_service, launch, replace_build_engine
from tests.service.fake_engine import FakeEngine
from tests.service.http_get import get
from tests.service.server.auth.certificates import TOKENS, CredentialFiles
from tests.started_threads import started_threads
from tests.telemetry.test_metrics import ended_request


def telemetry(*settings):
    return Telemetry(Config.load(settings=settings))


def scrape(address):
    """Return the values of all samples in a scrape, by name."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        text = response.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_without_a_port_nothing_is_served_and_nothing_observed():
    quiet = telemetry()
    started = started_threads()
    with quiet.serving(FakeEngine()) as address:
        assert (quiet.observers, address) == ([], None)
        assert not started("radixkv-metrics")


def test_a_scrape_has_the_counts_of_steps_and_the_gauges_of_the_engine():
    watching = telemetry("server.metrics_port=0")
    with watching.serving(FakeEngine()) as address:
        watching.observers[0].step_done(0.25, 3, 100, 2)
        samples = scrape(address)
    assert samples["radixkv_step_seconds_sum"] == 0.25
    assert samples["radixkv_evicted_blocks_total"] == 2**53
    assert samples["radixkv_up"] == 1
    assert samples["process_resident_memory_bytes"] > 0


@pytest.mark.parametrize("path", ["/page", "/metrics/", "/metric", "/favicon.ico", "/healthz/x", "/%2e%2e/etc/passwd"])
def test_unknown_paths_are_not_found(path):
    with telemetry("server.metrics_port=0").serving(FakeEngine()) as address:
        assert get(address, path)[:2] == (404, "Not Found\n")


@pytest.mark.parametrize(
    ("can_recover", "is_healthy", "healthz", "readyz"),
    [(True, True, 200, 200), (True, False, 200, 503), (False, False, 503, 503)],
    ids=["serving", "draining or failing", "a step blocks, steps fail for too long, or the thread ended"],
)
def test_health_checks_say_whether_a_restart_is_needed_and_whether_requests_are_accepted(
    can_recover, is_healthy, healthz, readyz
):
    engine = FakeEngine()
    with telemetry("server.metrics_port=0").serving(engine) as address:
        engine.can_recover, engine.is_healthy = can_recover, is_healthy
        assert [get(address, path)[0] for path in ("/healthz", "/readyz")] == [healthz, readyz]
        assert get(address, "/healthz", method="HEAD")[:2] == (healthz, "")
        status, _, headers = get(address, "/readyz", method="POST")
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_service_that_starts_is_alive_and_not_ready():
    starting = telemetry("server.metrics_port=0")
    with starting.serving() as address:
        assert [get(address, path)[0] for path in ("/healthz", "/readyz", "/", "/state.json")] == [200, 503, 503, 503]
        assert "radixkv_up" not in scrape(address)
        starting.watch(FakeEngine())
        assert [get(address, path)[0] for path in ("/healthz", "/readyz", "/", "/state.json")] == [200] * 4
        assert scrape(address)["radixkv_up"] == 1


def test_a_scrape_can_select_metrics_by_name():
    with telemetry("server.metrics_port=0").serving(FakeEngine()) as address:
        _, text, _ = get(address, "/metrics?name[]=radixkv_blocks&name[]=radixkv_evicted_blocks_total")
        _, histogram, _ = get(address, "/metrics?name[]=radixkv_step_seconds")
    names = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    assert names == {"radixkv_blocks", "radixkv_evicted_blocks_total"}
    samples = {sample.name for family in text_string_to_metric_families(histogram) for sample in family.samples}
    assert samples == {f"radixkv_step_seconds_{suffix}" for suffix in ("bucket", "sum", "count")}


def test_tenants_of_the_configuration_are_known_before_their_first_request():
    watching = telemetry("server.metrics_port=0", "tenants.acme.floor_tokens=64")
    with (
        watching.serving(FakeEngine()) as address,
        urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_S) as response,
    ):
        assert 'radixkv_cached_tokens_total{tenant="acme"} 0.0' in response.read().decode()


def test_the_port_is_free_again_and_no_thread_is_left():
    started = started_threads()
    with telemetry("server.metrics_port=0").serving(FakeEngine()) as address:
        pass
    assert not started("radixkv-metrics")
    with telemetry(f"server.metrics_port={address.rpartition(':')[2]}").serving(FakeEngine()) as again:
        assert again == address
    with pytest.raises(urllib.error.URLError):
        scrape(address)


def test_the_port_is_free_again_after_a_failure():
    def fail():
        with telemetry("server.metrics_port=0").serving(FakeEngine()) as address:
            raise ConfigError(address)

    with pytest.raises(ConfigError) as caught:
        fail()
    with pytest.raises(urllib.error.URLError):
        scrape(str(caught.value))


def test_requests_are_traced_where_opentelemetry_is_set_up(monkeypatch):
    provider = TracerProvider()
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert telemetry().observers == [], "opentelemetry is installed, but not set up"
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    for settings in ([], ["server.metrics_port=0"]):
        for observer in telemetry(*settings).observers:
            observer.request_ended(ended_request(), Outcome.CANCELLED, None, 101.0)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["queue", "Prefill"] * 2
    assert spans[0].instrumentation_scope.name == "radixkv"


def test_nothing_is_traced_where_opentelemetry_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert telemetry().observers == []


def test_an_ipv6_address_is_bound():
    with socket.socket(socket.AF_INET6) as other:
        try:
            other.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    with telemetry("server.metrics_port=0", 'server.host="::1"').serving(FakeEngine()) as address:
        assert re.fullmatch(r"\[::1\]:[1-9]\d*", address)
        assert scrape(address)["radixkv_up"] == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "a" * 64 + ".example"])
def test_an_address_of_another_machine_is_a_config_error(host):
    watching = telemetry("server.metrics_port=0", f"server.host={host}")
    with (
        pytest.raises(
            ConfigError, match=re.escape(f"server.metrics_port: expected a free address of this machine, got {host}:0")
        ),
        watching.serving(FakeEngine()),
    ):
        pass


def test_a_port_in_use_stops_the_service_before_the_engine_starts(capsys, monkeypatch):
    engine = FakeEngine()
    replace_build_engine(monkeypatch, lambda config, observer: engine)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "--port", "0", "--metrics-port", str(port)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        f"radixkv: server.host, server.metrics_port: expected a free address of this machine, got 127.0.0.1:{port}"
    )
    assert not engine.is_started


def test_a_port_with_two_names_stops_the_service_too(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    assert main(["serve", "--port", port, "--metrics-port", port]) == 2
    message = f"radixkv: server.metrics_port: expected another port than server.port, got {port} for both"
    assert capsys.readouterr().err.splitlines()[-1] == message


def test_the_command_serves_metrics_and_names_the_port_on_stderr_only():
    with fake_service("--metrics-port", "0") as (process, address), Client(address, timeout_s=PATIENCE_S) as client:
        client.prefill([4])
        line = next(line for line in process.stderr if "metrics on" in line)
        samples = scrape(re.search(r"http://(127\.0\.0\.1:[1-9]\d*)/metrics$", line)[1])
        process.terminate()
        out, err = process.communicate(timeout=PATIENCE_S)
    assert samples["radixkv_healthy"] == 1
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_a_wrong_metrics_port_is_named():
    code, out, err = launch(LAUNCHER, "open", "serve", "--port", "0", "--metrics-port", "70000")
    assert (code, out, err) == (2, "", "radixkv: server.metrics_port: expected 0 to 65535, got 70000\n")


def get_over_tls(address, path, credential_files, caller=None):
    """Return the status and the body of a response over HTTPS to a caller with a token, or without one."""
    headers = {} if caller is None else {"Authorization": f"Bearer {TOKENS[caller]}"}
    request = urllib.request.Request(f"https://{address}{path}", headers=headers)
    context = ssl.create_default_context(cafile=credential_files.ca_file)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S, context=context) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_with_credentials_only_admins_and_readers_read_more_than_the_health_and_only_over_tls(tmp_path):
    credential_files = CredentialFiles(tmp_path)
    settings = [f"server.{key}={json.dumps(value)}" for key, value in credential_files.tls.items()]
    with telemetry("server.metrics_port=0", *settings).serving(FakeEngine()) as address:
        assert get_over_tls(address, "/metrics", credential_files, "boss")[0] == 200
        assert get_over_tls(address, "/metrics", credential_files, "watcher")[0] == 200
        assert get_over_tls(address, "/nothing", credential_files, "boss")[0] == 404
        assert get_over_tls(address, "/metrics", credential_files) == (401, "Unauthorized\n")
        assert get_over_tls(address, "/nothing", credential_files) == (401, "Unauthorized\n")
        assert get_over_tls(address, "/metrics", credential_files, "acme") == (403, "Forbidden\n")
        assert [get_over_tls(address, path, credential_files)[0] for path in ("/healthz", "/readyz", "/")] == [
            200,
            200,
            200,
        ]
        callers = (None, "acme", "every", "watcher", "boss")
        states = [get_over_tls(address, "/state.json", credential_files, caller)[0] for caller in callers]
        assert states == [401, 403, 403, 200, 200], "only readers and admins see the state; the page itself has no data"
        with pytest.raises(OSError):
            get(address, "/healthz")
        assert get_over_tls(address, "/healthz", credential_files)[0] == 200


def test_a_caller_that_stalls_during_its_handshake_does_not_block_others(tmp_path):
    credential_files = CredentialFiles(tmp_path)
    settings = [f"server.{key}={json.dumps(value)}" for key, value in credential_files.tls.items()]
    with telemetry("server.metrics_port=0", *settings).serving(FakeEngine()) as address:
        host, port = address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as silent:
            silent.sendall(b"\x16\x03")
            assert get_over_tls(address, "/healthz", credential_files)[0] == 200


NUM_SILENT = 70  # more connections than the port has slots


@contextlib.contextmanager
def silent_connections(address, num_connections):
    """Yield connections that have sent nothing."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(num_connections)]


@pytest.mark.parametrize("has_tls", [False, True])
def test_callers_that_send_no_request_do_not_block_others(tmp_path, monkeypatch, has_tls):
    monkeypatch.setattr(metrics_port, "_REQUEST_S", PATIENCE_S)
    credential_files = CredentialFiles(tmp_path)
    settings = [f"server.{key}={json.dumps(value)}" for key, value in credential_files.tls.items()] if has_tls else []
    with (
        telemetry("server.metrics_port=0", *settings).serving(FakeEngine()) as address,
        silent_connections(address, NUM_SILENT),
    ):
        for path in ("/healthz", "/readyz"):
            answer = get_over_tls(address, path, credential_files) if has_tls else get(address, path)
            assert answer[0] == 200


def test_a_request_that_arrives_byte_by_byte_has_the_timeout_of_one(monkeypatch):
    monkeypatch.setattr(metrics_port, "_REQUEST_S", 0.2)
    with (
        telemetry("server.metrics_port=0").serving(FakeEngine()) as address,
        silent_connections(address, 1) as (slow,),
    ):
        slow.settimeout(0.02)
        end_s = time.monotonic() + PATIENCE_S
        has_ended = False
        while not has_ended and time.monotonic() < end_s:
            try:
                slow.sendall(b"G")
                has_ended = slow.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                has_ended = True
        assert has_ended


def test_a_connection_that_has_sent_a_request_is_answered_however_many_silent_ones_follow(monkeypatch):
    monkeypatch.setattr(metrics_port, "_REQUEST_S", PATIENCE_S)
    is_checked, may_answer = threading.Event(), threading.Event()

    class WaitingEngine(FakeEngine):
        """An engine whose health is reported only when `may_answer` is set."""

        @property
        def can_recover(self):
            is_checked.set()
            return may_answer.wait(PATIENCE_S)

        @can_recover.setter
        def can_recover(self, value):
            pass

    with telemetry("server.metrics_port=0").serving(WaitingEngine()) as address, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(get, address, "/healthz")
        assert is_checked.wait(PATIENCE_S)
        with silent_connections(address, NUM_SILENT):
            assert get(address, "/readyz")[0] == 200
            may_answer.set()
            assert answer.result(PATIENCE_S)[0] == 200
