"""Digests of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.integrations.tiers.checkpoint_digest import digest_of_checkpoint


def write_files(folder: Path, **contents: str) -> Path:
    """Write files into a new folder; an underscore in a name stands for the dot of the file's name."""
    folder.mkdir()
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_the_digest_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    files = {"config_json": "{}", "model_safetensors": "weights"}
    digest = digest_of_checkpoint(write_files(tmp_path / "a", **files))
    assert digest_of_checkpoint(write_files(tmp_path / "b", **files, README_md="no weights")) == digest
    other_digests = {
        digest_of_checkpoint(write_files(tmp_path / "c", **{**files, "model_safetensors": "other"})),
        digest_of_checkpoint(write_files(tmp_path / "d", **{**files, "config_json": "[]"})),
        digest_of_checkpoint(tmp_path / "a" / "model.safetensors"),
    }
    assert len({digest, *other_digests}) == 4


def test_without_files_the_error_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set model_id"):
        digest_of_checkpoint(tmp_path / "absent")
