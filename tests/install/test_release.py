"""The notes of a release, without building one; `make release` does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.install import release
from tests.install.release import Failed, Origin, changes, write_notes

ORIGIN = Origin("0123456789" * 4, 1_700_000_000, {"build": "1.2", "compiler": "c++ 12"})
WHEEL, SDIST = "radixkv-0.1.0-py3-none-manylinux_2_34_x86_64.whl", "radixkv-0.1.0.tar.gz"


def test_the_page_of_a_release_names_its_files_its_origin_and_its_changes(tmp_path: Path) -> None:
    for name in (WHEEL, SDIST):
        (tmp_path / name).write_text(name)
    write_notes(tmp_path, ORIGIN)
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in (WHEEL, SDIST)}
    assert (tmp_path / "SHA256SUMS").read_text() == "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    statement = json.loads((tmp_path / "provenance.json").read_text())
    assert {each["name"]: each["digest"]["sha256"] for each in statement["subject"]} == digests
    (source,) = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": ORIGIN.commit}
    page = (tmp_path / "RELEASE.md").read_text()
    assert all(part in page for part in (*digests, *digests.values(), ORIGIN.commit, "2023-11-14", "c++ 12"))
    assert "### Added" in page


def test_a_version_without_a_section_in_the_changelog_is_refused() -> None:
    with pytest.raises(Failed, match=r"expected a section ## 9\.9, got none"):
        changes("## 1.0\n\nOld.\n", "9.9")


def test_uncommitted_changes_and_existing_folders_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "_run", lambda *command, **options: " M README.md")
    assert release.main(["--out", str(tmp_path / "new")]) == 1
    assert "expected a checkout without uncommitted changes, got\n M README.md" in capsys.readouterr().out
    monkeypatch.setattr(release, "_run", lambda *command, **options: "")
    assert release.main(["--out", str(tmp_path)]) == 1
    assert "--out: expected a new folder" in capsys.readouterr().out
