"""The files of docs/deploy that other programs read, as far as these programs are here."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from radixkv.config import ServerConfig
from radixkv.engine.offload.offload import CLOSE_LIMIT_S
from tests.patience import PATIENCE_S

from .prometheus import DEPLOY, PROMTOOL

ROOT = DEPLOY.parents[1]
SYSTEMD_ANALYZE = shutil.which("systemd-analyze")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool: apt-get install prometheus")
needs_systemd = pytest.mark.skipif(SYSTEMD_ANALYZE is None, reason="needs systemd-analyze")

UNIT = (DEPLOY / "radixkv.service").read_text(encoding="utf-8")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def output_of(*command: str | Path | None, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
def test_each_alarm_is_raised_by_its_cause_and_none_without(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "alerts.yaml", tmp_path)
    shutil.copy(Path(__file__).parent / "alarms.yaml", tmp_path)
    assert "SUCCESS" in output_of(PROMTOOL, "test", "rules", "alarms.yaml", cwd=tmp_path)


@needs_promtool
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    for name in ("prometheus.yml", "alerts.yaml"):
        shutil.copy(DEPLOY / name, tmp_path)
    for name in ("server.pem", "reader.token"):
        (tmp_path / name).write_text("")
    assert "SUCCESS" in output_of(PROMTOOL, "check", "config", "prometheus.yml", cwd=tmp_path)


def test_every_alarm_is_in_the_runbook_and_in_the_test_of_alarms() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    names = [rule["alert"] for rule in rules]
    told = re.findall(r"^\| (Radixkv\w+) \|", (ROOT / "docs/RUNBOOK.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert told == names
    raised = re.findall(r'alertname="(\w+)"', (Path(__file__).parent / "alarms.yaml").read_text(encoding="utf-8"))
    assert raised == names


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is there."""
    assert UNIT.count("ExecStart=/opt/radixkv/bin/radixkv ") == 1
    (tmp_path / "radixkv.service").write_text(UNIT.replace("/opt/radixkv/bin/radixkv", "/bin/true"))
    return tmp_path / "radixkv.service"


@needs_systemd
def test_systemd_finds_nothing_wrong_in_the_unit(unit: Path) -> None:
    assert "radixkv.service" not in output_of(SYSTEMD_ANALYZE, "verify", "--man=no", unit, cwd=unit.parent)


@needs_systemd
def test_the_unit_exposes_little(unit: Path) -> None:
    told = output_of(SYSTEMD_ANALYZE, "security", "--offline=true", "--no-pager", unit, cwd=unit.parent)
    exposure = re.search(r"Overall exposure level for radixkv.service: ([\d.]+)", told)
    assert exposure is not None
    assert float(exposure[1]) <= 1.5


def test_who_stops_the_service_waits_longer_than_it_takes_to_drain_and_to_save_the_cache() -> None:
    longest_s = ServerConfig().drain_timeout_s + CLOSE_LIMIT_S + 5
    assert float(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)[0]) > longest_s
    assert float(COMPOSE["services"]["radixkv"]["stop_grace_period"].removesuffix("s")) > longest_s


def test_the_image_copies_and_starts_what_there_is() -> None:
    lines = [line.split() for line in DOCKERFILE.splitlines()]
    copied = [source for line in lines if line[:1] == ["COPY"] for source in line[1:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    folders = set(re.findall(r'^\w*"?[\w.]*"? = "(kernels|service|radixkv)"$', text_of("pyproject.toml"), re.MULTILINE))
    assert folders <= set(copied)
    extras = re.findall(r"\.\[([\w,]+)\]' &&", DOCKERFILE)[0].split(",")
    assert all(re.search(rf"^{extra} = \[", text_of("pyproject.toml"), re.MULTILINE) for extra in extras)
    entry, command = (
        json.loads(DOCKERFILE.partition(f"\n{word} ")[2].partition("\n")[0]) for word in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["radixkv"]
    assert shlex.join(command) in UNIT


def test_the_image_has_the_torch_that_the_package_keeps() -> None:
    (wanted,) = re.findall(r'^ +"(torch[^"]*)",$', text_of("pyproject.toml"), re.MULTILINE)
    assert f"pip install --no-cache-dir '{wanted}' --index-url" in DOCKERFILE


def test_the_services_of_the_compose_file_read_files_that_there_are() -> None:
    services = COMPOSE["services"]
    assert (ROOT / services["radixkv"]["build"]["dockerfile"]).exists()
    used = {config["source"] for service in services.values() for config in service.get("configs", [])}
    assert used == set(COMPOSE["configs"])
    for config in COMPOSE["configs"].values():
        assert yaml.safe_load(config["content"])["apiVersion"] == 1
    assert {name.partition(":")[2] for name in [services["prometheus"]["network_mode"]]} <= set(services)


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
