"""Digests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.integrations.tiers.checkpoint_digest import digest_of_checkpoint


def checkpoint(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("_", ".")).write_text(content)
    return path


def test_the_digest_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    files = {"config_json": "{}", "model_safetensors": "weights"}
    digests = [
        digest_of_checkpoint(checkpoint(tmp_path / "a", **files)),
        digest_of_checkpoint(checkpoint(tmp_path / "b", **files, README_md="no weights")),
        digest_of_checkpoint(checkpoint(tmp_path / "c", **{**files, "model_safetensors": "other"})),
        digest_of_checkpoint(checkpoint(tmp_path / "d", **{**files, "config_json": "[]"})),
        digest_of_checkpoint(tmp_path / "a" / "model.safetensors"),
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_without_files_the_error_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set model_id"):
        digest_of_checkpoint(tmp_path / "absent")
