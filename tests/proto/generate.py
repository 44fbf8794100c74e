"""`python -m tests.proto.generate` writes the package `tokenlake_proto` from the declarations in `proto/tokenlake`. It
needs grpcio-tools 1.78.0 (code that newer ones generate does not load with protobuf 6) and mypy-protobuf 5.1.
`--record` also records the contract, with which `test_contract.py` compares later ones."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROTO = Path(__file__).parents[2] / "proto"
PACKAGE = PROTO / "tokenlake_proto"
CONTRACT = Path(__file__).with_name("contract.binpb")
"""The recorded descriptors: a FileDescriptorSet."""
TOOLS = "1.78.0"
"""Version of grpcio-tools."""


def declarations() -> list[str]:
    """The paths of all declarations, relative to `PROTO`."""
    return sorted(str(path.relative_to(PROTO)) for path in (PROTO / "tokenlake").rglob("*.proto"))


def generate(directory: Path, python: str = sys.executable) -> list[Path]:
    """Write the generated modules below `directory`, as the package has them. Returns their paths, relative to it."""
    plugins = [
        f"--plugin=protoc-gen-{name}={Path(python).parent / f'protoc-gen-{name}'}" for name in ("mypy", "mypy_grpc")
    ]
    with tempfile.TemporaryDirectory() as out:
        outs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        command = [python, "-m", "grpc_tools.protoc", f"-I{PROTO}", *plugins, *outs, *declarations()]
        subprocess.run(command, check=True, capture_output=True)
        written = []
        for made in sorted(Path(out).rglob("*_pb2*.py*")):
            text = made.read_text()
            if "_grpc" in made.name and "Stub" not in text:
                continue
            path = made.relative_to(Path(out) / "tokenlake")
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            # `tokenlake` is the package of the rules: the generated modules are below `tokenlake_proto`.
            text = re.sub(r"\b(from|import) tokenlake\.v1\b", r"\1 tokenlake_proto.v1", text)
            (directory / path).write_text(text)
            written.append(path)
    return written


def record(python: str = sys.executable) -> None:
    """Record the contract."""
    wanted = [name for name in declarations() if "/v1/" in name]
    command = [python, "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--descriptor_set_out={CONTRACT}", *wanted]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    generate(PACKAGE)
    if "--record" in sys.argv:
        record()
