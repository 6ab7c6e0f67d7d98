"""Models in the local cache of Hugging Face, where `hf download` puts them. Nothing is downloaded."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?")
_DEFAULT_REVISION = "main"
_MAX_NAME_LENGTH = 200  # keeps the names of the cache's folders below the 255 bytes that file systems allow


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the Hugging Face Hub.

    >>> HubName.parse("org/model@v1")
    HubName(repository='org/model', revision='v1')
    >>> HubName.parse("./model"), HubName.parse("org/model/file")
    (None, None)

    Attributes:
        repository: `ORG/NAME`.
        revision: a branch, a tag, a reference such as `refs/pr/1`, or a commit.
    """

    repository: str
    revision: str = _DEFAULT_REVISION

    @classmethod
    def parse(cls, text: str) -> HubName | None:
        """Return the name in `ORG/NAME` or `ORG/NAME@REVISION`; None for other texts."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text or len(text) > _MAX_NAME_LENGTH:
            return None
        return cls(match[1], match[2] or _DEFAULT_REVISION)

    @property
    def download_command(self) -> str:
        """The command that downloads the model."""
        revision = "" if self.revision == _DEFAULT_REVISION else f" --revision {self.revision}"
        return f"hf download {self.repository}{revision}"

    def snapshot(self) -> Path | None:
        """Return the directory with the files of the revision; None if the revision is not in the cache."""
        folder = hub_cache() / f"models--{self.repository.replace('/', '--')}"
        try:
            commit = (folder / "refs" / self.revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            commit = self.revision
        directory = folder / "snapshots" / commit
        return directory if re.fullmatch(r"[\w-]+", commit) and os.path.isdir(directory) else None


def hub_cache() -> Path:
    """Return the directory of the cache.

    The variables HF_HUB_CACHE or HUGGINGFACE_HUB_CACHE, HF_HOME and XDG_CACHE_HOME determine it, in this order.
    """
    environment = os.environ
    cache = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    if not cache:
        base = environment.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        home = environment.get("HF_HOME") or os.path.join(base, "huggingface")
        cache = os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))
