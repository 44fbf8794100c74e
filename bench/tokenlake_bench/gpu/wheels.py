"""The folder of wheels for a machine with a GPU that has torch and reaches no package index: `python -m
tokenlake_bench.gpu.wheels FOLDER`. `bench/gpu.sh` installs them there, for the checks alone."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

WHEELS: Final = (
    "cffi",
    "click",
    "cryptography",
    "grpcio",
    "markdown-it-py",
    "mdurl",
    "msgspec",
    "prometheus-client",
    "protobuf",
    "pycparser",
    "pygments",
    "rich",
    "sortedcontainers",
    "typing-extensions",
    "uvloop",
    "xxhash",
    "zstandard",
)
"""What a daemon, a client and the checks import beside torch, transformers, numpy and Triton."""
PLATFORMS: Final = (*(f"manylinux_2_{minor}_x86_64" for minor in (34, 28, 27, 17, 12, 5)), "manylinux2014_x86_64")
CONSTRAINTS: Final = Path(__file__).parents[3] / "constraints.txt"


def main(arguments: list[str] | None = None) -> int:
    """The main function. Returns pip's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tokenlake_bench.gpu.wheels", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version of Python there")
    given = parser.parse_args(arguments)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation", "cp", "--python-version", given.python, "--dest", str(given.folder)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    return subprocess.run([*command, "--constraint", str(CONSTRAINTS), *WHEELS], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
