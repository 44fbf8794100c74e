"""A server with S3's interface (moto) as a process, for tests of the cold tier on S3."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.server.cold.scene import until
from tokenlake_testing.ports import free_port

needs_s3 = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in ("obstore", "moto", "flask", "flask_cors")),
    reason="obstore and moto are not installed (make install-dev)",
)
BUCKET = "tokenlake-test"


class Bucket(NamedTuple):
    """A server with one bucket."""

    variables: dict[str, str]
    """Of the environment of its users."""
    process: subprocess.Popen[bytes]


@contextmanager
def s3_server(log: Path) -> Iterator[Bucket]:
    """A server with one empty bucket."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=output, stderr=output
        )
    try:
        until(lambda: _makes_bucket(url) or server.poll() is not None, "moto serves")
        assert server.poll() is None, log.read_text()
        variables = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "an id",
            "AWS_SECRET_ACCESS_KEY": "a secret key",
            "AWS_REGION": "us-east-1",
        }
        yield Bucket(variables, server)
    finally:
        server.kill()
        server.wait()


def _makes_bucket(url: str) -> bool:
    try:
        with urlopen(Request(f"{url}/{BUCKET}", method="PUT"), timeout=5):
            return True
    except (URLError, OSError):
        return False


@contextmanager
def of_server(variables: dict[str, str]) -> Iterator[None]:
    """This process is a user of the server."""
    with patch.dict(os.environ, variables):
        yield
