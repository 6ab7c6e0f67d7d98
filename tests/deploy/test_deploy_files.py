"""The files in docs/deploy, checked with the programs that read them if those are installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixkv.config import Config, ServerConfig
from radixkv.offload.offload import CLOSE_LIMIT_S
from radixkv.service.cli.main import make_parser
from radixkv.service.server.metrics_port import OPEN_PATHS
from tests.patience import PATIENCE_S

from .prometheus import DEPLOY, PROMTOOL

ROOT = DEPLOY.parents[1]
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus")
needs_systemd = pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="needs systemd-analyze")

UNIT = (DEPLOY / "radixkv.service").read_text(encoding="utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
IGNORE_LINES = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()


class ComposeLoader(yaml.SafeLoader):
    """Loads compose files, whose tags `!override` and `!reset` control how files are merged."""


def load_merged_list(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """Return the list after a merge tag."""
    assert isinstance(node, yaml.SequenceNode)
    return loader.construct_sequence(node, deep=True)


for tag in ("!override", "!reset"):
    ComposeLoader.add_constructor(tag, load_merged_list)
COMPOSE, COMPOSE_TLS = (
    yaml.load((DEPLOY / name).read_text(encoding="utf-8"), ComposeLoader)
    for name in ("compose.yaml", "compose.tls.yaml")
)

# The time to stop besides draining and saving the cache: at most 4 s to send responses and close connections, and 5 s
# for a tier or a step that does not end.
OTHER_STOP_S = 9.0
KUBERNETES = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))


def output_of(*command: str | Path | None, cwd: Path) -> str:
    done = subprocess.run(
        [str(argument) for argument in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
def test_each_alert_fires_for_its_cause_only(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "alerts.yaml", tmp_path)
    shutil.copy(Path(__file__).parent / "alert_rules.yaml", tmp_path)
    assert "SUCCESS" in output_of(PROMTOOL, "test", "rules", "alert_rules.yaml", cwd=tmp_path)


@needs_promtool
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "alerts.yaml"):
        shutil.copy(DEPLOY / name, tmp_path)
    for name in ("server.pem", "reader.token"):
        (tmp_path / name).write_text("")
    assert "SUCCESS" in output_of(PROMTOOL, "check", "config", "prometheus.yml", cwd=tmp_path)


def test_every_alert_is_in_the_runbook_and_is_tested() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    names = [rule["alert"] for rule in rules]
    documented = re.findall(
        r"^\| (Radixkv\w+) \|", (ROOT / "docs/RUNBOOK.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert documented == names
    tested = re.findall(r'alertname="(\w+)"', (Path(__file__).parent / "alert_rules.yaml").read_text(encoding="utf-8"))
    assert tested == names


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The path of a copy of the systemd unit that starts a program that exists."""
    assert UNIT.count("ExecStart=/opt/radixkv/bin/radixkv ") == 1
    (tmp_path / "radixkv.service").write_text(UNIT.replace("/opt/radixkv/bin/radixkv", "/bin/true"))
    return tmp_path / "radixkv.service"


@needs_systemd
def test_systemd_accepts_the_unit(unit: Path) -> None:
    assert "radixkv.service" not in output_of(SYSTEMD_ANALYZE, "verify", "--man=no", unit, cwd=unit.parent)


@needs_systemd
def test_the_unit_has_a_low_exposure_level(unit: Path) -> None:
    report = output_of(SYSTEMD_ANALYZE, "security", "--offline=true", "--no-pager", unit, cwd=unit.parent)
    exposure = re.search(r"Overall exposure level for radixkv.service: ([\d.]+)", report)
    assert exposure is not None
    assert float(exposure[1]) <= 1.5


def test_the_stop_timeouts_exceed_the_time_to_drain_and_to_save_the_cache() -> None:
    max_stop_s = ServerConfig().drain_timeout_s + CLOSE_LIMIT_S + OTHER_STOP_S
    assert float(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0]) > max_stop_s
    assert float(COMPOSE["services"]["radixkv"]["stop_grace_period"].removesuffix("s")) > max_stop_s


def arguments_of_instruction(name: str) -> str:
    """Return the arguments of the last instruction with this name in the Dockerfile."""
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)[-1]


def test_the_build_context_contains_the_whole_package(tmp_path: Path) -> None:
    """`COPY . .` keeps symbolic links, so the build context must contain their targets."""
    assert "COPY . ." in DOCKERFILE
    assert IGNORE_LINES[1] == "*", "everything is ignored except the files that later lines include"
    included = {line.removeprefix("!") for line in IGNORE_LINES if line.startswith("!")}
    links = [path for path in (ROOT / "radixkv").iterdir() if path.is_symlink()]
    assert {str(path.resolve().relative_to(ROOT)) for path in links} <= included
    for name in included:
        if (source := ROOT / name).is_dir():
            shutil.copytree(source, tmp_path / name, symlinks=True)
        elif source.exists():
            shutil.copy(source, tmp_path / name)
    program = "from setuptools import find_packages as f; print(*f('.', include=['radixkv', 'radixkv.*']))"
    packages = set(output_of(sys.executable, "-c", program, cwd=tmp_path).split())
    assert {"radixkv", "radixkv.kernels.native", "radixkv.service.cli", "radixkv.service.server.page"} <= packages


def test_the_build_stage_has_a_compiler_and_the_image_has_none() -> None:
    build, image = DOCKERFILE.split("\nFROM ")[-2:]
    assert "g++" in build
    assert "pip wheel" in build
    assert "g++" not in image
    assert "apt-get" not in image


def test_the_extras_of_the_image_exist() -> None:
    (extras,) = re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE)
    assert all(re.search(rf"^{extra} = \[", text_of("pyproject.toml"), re.MULTILINE) for extra in extras.split(","))


def test_the_image_starts_without_files_and_listens_on_loopback() -> None:
    assert json.loads(arguments_of_instruction("ENTRYPOINT")) == ["radixkv"]
    arguments = make_parser().parse_args(json.loads(arguments_of_instruction("CMD")))
    assert (arguments.config, arguments.model, arguments.host) == (None, None, None)
    assert ServerConfig().host == "127.0.0.1"


def test_the_health_check_works_with_and_without_tls() -> None:
    check = arguments_of_instruction("HEALTHCHECK").partition(" CMD ")[2]
    program, *arguments = json.loads(check)
    assert program == "radixkv"
    parsed = make_parser().parse_args(arguments)
    assert parsed.address == f"127.0.0.1:{ServerConfig().port}"
    assert parsed.tls_ca is None  # tests/service/cli/test_health.py runs it against both


def test_the_image_installs_the_torch_version_of_the_package() -> None:
    (requirement,) = re.findall(r'^ +"(torch[^"]*)",$', text_of("pyproject.toml"), re.MULTILINE)
    assert f"pip install --no-cache-dir '{requirement}' --index-url" in DOCKERFILE


def volume_paths(service: dict[str, Any]) -> list[Path]:
    """Return where the volumes of a service are mounted in its container."""
    mounts_without_mode = [re.sub(r":(ro|rw)$", "", mount) for mount in service.get("volumes", [])]
    return [Path(mount.rpartition(":")[2]) for mount in mounts_without_mode]


def test_the_cache_directory_is_writable_and_executable() -> None:
    """The kernels that the server compiles are loaded from there, and Docker mounts a tmpfs with noexec."""
    server = COMPOSE["services"]["radixkv"]
    (cache,) = re.findall(r"\bXDG_CACHE_HOME=(\S+)", DOCKERFILE)
    cache = server.get("environment", {}).get("XDG_CACHE_HOME", cache)
    cache_directory = Path(cache) / "radixkv"
    assert server["read_only"]
    assert cache_directory in volume_paths(server)
    assert not any(cache_directory.is_relative_to(path) for path in server.get("tmpfs", []))
    assert f"mkdir --mode 1777 {cache_directory}" in DOCKERFILE, "any user may write, as compose.tls.yaml sets another"


def test_compose_uses_only_its_own_variables_and_requires_them() -> None:
    for file_name in ("compose.yaml", "compose.tls.yaml"):
        text = re.sub(r"#.*", "", (DEPLOY / file_name).read_text(encoding="utf-8"))
        variables = re.findall(r"\$\{?(\w+)([^}]*)", text)
        # Compose refuses to start with an empty variable that is written as ${NAME:?message}.
        assert all(name.startswith("RADIXKV_") and operator.startswith(":?") for name, operator in variables)


def test_a_server_without_credentials_is_published_on_loopback_only() -> None:
    server = COMPOSE["services"]["radixkv"]
    assert "--insecure" in server["command"]
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(str(port).startswith("127.0.0.1:") for port in published)
    assert "--insecure" not in COMPOSE_TLS["services"]["radixkv"]["command"]


@pytest.mark.parametrize("compose", [COMPOSE, COMPOSE_TLS], ids=["compose.yaml", "compose.tls.yaml"])
def test_the_commands_of_the_compose_files_parse(compose: dict[str, Any]) -> None:
    make_parser().parse_args(compose["services"]["radixkv"]["command"])


def test_the_files_that_compose_mounts_exist() -> None:
    build = COMPOSE["services"]["radixkv"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()
    used = [config["source"] for service in COMPOSE["services"].values() for config in service.get("configs", [])]
    assert sorted(used) == sorted(COMPOSE["configs"])
    for config in COMPOSE["configs"].values():
        assert yaml.safe_load(config["content"])
    mounts = [
        mount
        for compose in (COMPOSE, COMPOSE_TLS)
        for service in compose["services"].values()
        for mount in service.get("volumes", [])
    ]
    assert all((DEPLOY / mount.partition(":")[0]).exists() for mount in mounts if mount.startswith("./"))
    assert set(COMPOSE_TLS["services"]) <= set(COMPOSE["services"])


@needs_promtool
def test_prometheus_accepts_the_configuration_in_compose(tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(COMPOSE["configs"]["scrape"]["content"])
    shutil.copy(DEPLOY / "alerts.yaml", tmp_path)
    assert "SUCCESS" in output_of(PROMTOOL, "check", "config", "prometheus.yml", cwd=tmp_path)


def test_the_unit_can_compile_and_load_kernels_in_its_cache() -> None:
    (cache,) = re.findall(r"^Environment=.*\bXDG_CACHE_HOME=(\S+)", UNIT, re.MULTILINE)
    (directory,) = re.findall(r"^CacheDirectory=(\S+)$", UNIT, re.MULTILINE)
    assert Path(cache) / "radixkv" == Path("/var/cache") / directory
    assert "NoExecPaths" not in UNIT
    assert "MemoryDenyWriteExecute=no" in UNIT


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("manifest", KUBERNETES, ids=lambda manifest: manifest["kind"])
def test_a_manifest_is_valid(manifest: dict[str, Any]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, "1.34", strict=True)


def test_the_manifests_agree_with_the_server(tmp_path: Path) -> None:
    manifests = {each["kind"]: each for each in KUBERNETES}
    (tmp_path / "radixkv.toml").write_text(manifests["ConfigMap"]["data"]["radixkv.toml"])
    config = Config.load(tmp_path / "radixkv.toml").server
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert make_parser().parse_args(container["args"]).config == "/etc/radixkv/radixkv.toml"
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {"grpc": config.port, "http": config.http_port, "metrics": config.metrics_port}
    assert [(each["name"], each["port"]) for each in manifests["Service"]["spec"]["ports"]] == list(ports.items())
    assert pod["terminationGracePeriodSeconds"] > config.drain_timeout_s + CLOSE_LIMIT_S + OTHER_STOP_S
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/readyz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert set(paths.values()) <= set(OPEN_PATHS)
    assert f"useradd --uid {pod['securityContext']['runAsUser']} " in DOCKERFILE
    (cache,) = re.findall(r"\bXDG_CACHE_HOME=(\S+)", DOCKERFILE)
    assert f"{cache}/radixkv" in {each["mountPath"] for each in container["volumeMounts"]}
    ingress_rules = manifests["NetworkPolicy"]["spec"]["ingress"]
    assert config.insecure
    assert ingress_rules == [{"from": [{"podSelector": {}}]}], "only pods of the same Kubernetes namespace may connect"
