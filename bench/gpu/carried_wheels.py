"""Downloads the wheels that a GPU machine without a package index may lack, into one folder.

python -m bench.gpu.carried_wheels wheels
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

# The generated code of radixkv/v1 needs gRPC 1.76.0 and protobuf 6.31.1 or later. Health checks and reflection are
# optional. FlashAttention 3 is for a peer in `bench.attention_peers`.
WHEELS = {
    "grpcio": "1.76.0",
    "protobuf": "6.33.6",
    "grpcio-health-checking": "1.76.0",
    "grpcio-reflection": "1.76.0",
    "fa3-fwd": "0.0.3",
}
_PYTHON = "3.12"
_GLIBC_MINOR_VERSIONS = (17, 24, 27, 28, 31, 34, 35)  # pip finds only wheels whose platform is named exactly


def download_command(name: str, version: str, folder: Path) -> list[str]:
    """Return the command that downloads one wheel for the GPU machine's Python and processor."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", _PYTHON, "--implementation", "cp", "--abi", f"cp{_PYTHON.replace('.', '')}"]
    command += ["--abi", "abi3", "--abi", "none", "--platform", "manylinux2014_x86_64"]
    for minor in _GLIBC_MINOR_VERSIONS:
        command += ["--platform", f"manylinux_2_{minor}_x86_64"]
    return [*command, "--dest", str(folder), f"{name}=={version}"]


def main() -> int:
    """Download all wheels and print their sizes. Returns 1 if one is not available."""
    parser = argparse.ArgumentParser(description="Download the wheels that a GPU machine may lack.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without", nargs="*", choices=sorted(WHEELS), default=[], help="wheels to leave out")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for name, version in WHEELS.items():
        if name not in options.without:
            completed = subprocess.run(download_command(name, version, options.folder), check=False)
            if completed.returncode != 0:
                missing.append(name)
    wheels = sorted(options.folder.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 1e6:>6.2f} MB  {wheel.name}")
    print(f"{sum(wheel.stat().st_size for wheel in wheels) / 1e6:>6.2f} MB in all")
    if missing:
        print(f"not downloaded: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
