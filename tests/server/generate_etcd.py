"""`python -m tests.server.generate_etcd` writes the messages of etcd's API again, from their declaration. It needs
grpcio-tools 1.78.0 (code that newer ones generate does not load with protobuf 6) and mypy-protobuf 5.1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SERVER = Path(__file__).parents[2] / "server"
PROTO = "tokenlake_server/membership/etcd_subset.proto"
TOOLS = "1.78.0"
"""Version of grpcio-tools."""
GENERATED = ("etcd_subset_pb2.py", "etcd_subset_pb2.pyi")


def generate(directory: Path, python: str = sys.executable) -> None:
    """Write the modules below `directory`, with the tools of the interpreter `python`."""
    plugin = Path(python).parent / "protoc-gen-mypy"
    command = [python, "-m", "grpc_tools.protoc", f"-I{SERVER}", f"--plugin=protoc-gen-mypy={plugin}"]
    subprocess.run([*command, f"--python_out={directory}", f"--mypy_out={directory}", PROTO], check=True)


if __name__ == "__main__":
    generate(SERVER)
