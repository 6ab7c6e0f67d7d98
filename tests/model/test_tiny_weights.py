"""The weights come with the package, are whole, and fit its bounds."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from radixkv.config import ModelConfig
from radixkv.errors import ConfigError
from radixkv.model import tiny_model
from radixkv.model.loading import load_model
from radixkv.model.tiny_model import build_tiny_model
from radixkv.model.tiny_weights import load_weights, shipped_weights, write_weights

MOST_BYTES = 8_000_000
ROOT = Path(__file__).parents[2]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    for name in ("weights.safetensors", "weights.safetensors.sha256"):
        (tmp_path / name).write_bytes((Path(str(shipped_weights())).parent / name).read_bytes())
    return tmp_path / "weights.safetensors"


def test_the_shipped_file_is_small_and_bfloat16() -> None:
    assert len(shipped_weights().read_bytes()) < MOST_BYTES
    assert {tensor.dtype for tensor in load_weights(shipped_weights()).values()} == {torch.bfloat16}


def test_the_digest_is_one_that_sha256sum_checks(copied: Path) -> None:
    command = ["sha256sum", "--check", "--strict", "weights.safetensors.sha256"]
    assert subprocess.run(command, cwd=copied.parent, capture_output=True, check=False).returncode == 0


def test_weights_that_are_written_are_read_again(tmp_path: Path, copied: Path) -> None:
    again = tmp_path / "again"
    again.mkdir()
    write_weights(build_tiny_model("eager"), again / "weights.safetensors")
    assert (again / "weights.safetensors").read_bytes() == copied.read_bytes()
    assert load_weights(again / "weights.safetensors").keys() == load_weights(copied).keys()


@pytest.mark.parametrize("place", [0, 5_000, -1])
def test_a_damaged_file_is_refused_by_name(copied: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    content = bytearray(copied.read_bytes())
    content[place] ^= 1
    copied.write_bytes(content)
    monkeypatch.setattr(tiny_model, "shipped_weights", lambda: copied)
    with pytest.raises(ConfigError, match=rf"^model\.path: tiny: expected {copied} with sha256 \w+, got \w+"):
        load_model(ModelConfig(device="cpu"))


def test_a_file_that_is_cut_short_is_refused(copied: Path) -> None:
    copied.write_bytes(copied.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="with sha256"):
        load_weights(copied)


@pytest.mark.parametrize("missing", ["weights.safetensors", "weights.safetensors.sha256"])
def test_a_missing_file_is_named(copied: Path, missing: str) -> None:
    (copied.parent / missing).unlink()
    with pytest.raises(ConfigError, match=rf"^model\.path: tiny: expected {copied} and its digest"):
        load_weights(copied)


def test_a_digest_of_nothing_is_refused(copied: Path) -> None:
    copied.with_name(copied.name + ".sha256").write_text("")
    with pytest.raises(ConfigError, match="and its digest"):
        load_weights(copied)


def test_the_package_ships_the_folder() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        (pattern,) = tomllib.load(file)["tool"]["setuptools"]["package-data"]["radixkv.model"]
    shipped = {path.name for path in (ROOT / "radixkv" / "model").glob(pattern)}
    assert shipped == {"NOTICE", "weights.safetensors", "weights.safetensors.sha256"}
