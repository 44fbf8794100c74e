"""The generated messages of etcd's API are those of their declaration."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.server.generate_etcd import GENERATED, PROTO, SERVER, TOOLS, generate


def python_with_tools() -> str | None:
    """An interpreter that has the tools: the one that `TOKENLAKE_TEST_PROTOC` names, or this one."""
    if named := os.environ.get("TOKENLAKE_TEST_PROTOC"):
        return named
    try:
        fits = importlib.metadata.version("grpcio-tools") == TOOLS
    except importlib.metadata.PackageNotFoundError:
        return None
    return sys.executable if fits and shutil.which("protoc-gen-mypy") else None


@pytest.mark.skipif(python_with_tools() is None, reason=f"grpcio-tools {TOOLS} and mypy-protobuf are not installed")
def test_the_generated_modules_follow_from_the_declaration(tmp_path: Path) -> None:
    python = python_with_tools()
    assert python is not None
    generate(tmp_path, python)
    for name in GENERATED:
        there = (SERVER / PROTO).parent / name
        assert (tmp_path / PROTO).parent.joinpath(name).read_text() == there.read_text(), f"generate {name} again"
