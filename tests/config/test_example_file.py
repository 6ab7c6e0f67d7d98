"""docs/deploy/radixkv.toml is up to date, and a server starts with it."""

import re
from pathlib import Path

import pytest

from radixkv.config import Config
from radixkv.config.config import read_setting
from tests.service.command_line import fake_service

from .example_file import ADAPTER, EXAMPLES, KV_SOURCE, STORE, TENANT, example_file

FILE = Path(__file__).parents[2] / "docs" / "deploy" / "radixkv.toml"
COMMENTED_KEY = re.compile(r"^# (\w+) = (.+)$", re.MULTILINE)  # keys without a default value


def test_the_file_is_up_to_date():
    assert FILE.read_text(encoding="utf-8") == example_file(), "run `python -m tests.config.example_file`"


def test_the_file_contains_the_default_values():
    assert Config.load(FILE) == Config()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_values_are_valid(name):
    section, _, key = name.partition(".")
    examples = COMMENTED_KEY.findall(FILE.read_text(encoding="utf-8"))
    (value,) = {value for example_key, value in examples if example_key == key}
    setting = f"{name}={value}"
    assert read_setting(setting)[section][key] == EXAMPLES[name]
    assert getattr(getattr(Config.load(FILE, [setting]), section), key) == EXAMPLES[name]


def test_the_example_of_a_tenant_is_valid(tmp_path):
    text = "\n".join(line.removeprefix("# ") for line in TENANT.splitlines()[1:])
    (tmp_path / "radixkv.toml").write_text(FILE.read_text(encoding="utf-8") + text)
    assert Config.load(tmp_path / "radixkv.toml").tenants["acme"].floor_tokens == 16_384


def test_the_example_of_an_adapter_is_valid(tmp_path):
    text = "\n".join(line.removeprefix("# ") for line in ADAPTER.splitlines()[1:])
    (tmp_path / "radixkv.toml").write_text(FILE.read_text(encoding="utf-8") + text)
    assert Config.load(tmp_path / "radixkv.toml").adapters["law"].path == "/srv/adapters/law"


def test_the_example_of_a_store_is_valid(tmp_path):
    text = "\n".join(line.removeprefix("# ") for line in STORE.splitlines()[1:])
    (tmp_path / "radixkv.toml").write_text(FILE.read_text(encoding="utf-8") + text)
    assert Config.load(tmp_path / "radixkv.toml").stores["shelf"].max_bytes == 200_000_000_000


def test_the_example_of_a_kv_source_is_valid(tmp_path):
    text = "\n".join(line.removeprefix("# ") for line in KV_SOURCE.splitlines()[1:])
    (tmp_path / "radixkv.toml").write_text(FILE.read_text(encoding="utf-8") + text)
    assert Config.load(tmp_path / "radixkv.toml").kv_sources["first"].address == "10.0.0.8:50051"


def test_a_server_starts_with_the_file():
    with fake_service("--config", str(FILE)) as (_, address):
        assert address.startswith("127.0.0.1:")
