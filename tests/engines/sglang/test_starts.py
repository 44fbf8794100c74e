"""The client changes no version of SGLang's environment, and an unknown setting ends the start with its name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.sglang.conftest import pool_of, prompt
from tokenlake.errors import Unreachable
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.engine_lines import Engine

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def test_no_version_changed() -> None:
    lines = Path(sys.prefix, "before-the-client.txt").read_text().splitlines()
    # Where the client is installed anew, the list names its earlier commit.
    before = [line for line in lines if not line.startswith("-e ")]
    command = [sys.executable, "-m", "pip", "freeze"]
    now = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(before) > 50
    assert sorted(set(before) - set(now)) == []


def test_an_unknown_setting_ends_the_start(start: Callable[..., Engine], cluster: Cluster) -> None:
    engine = start(pool_of(cluster.nodes[0], sokcet="/s"))
    with pytest.raises(Unreachable):
        engine.generate([prompt(10, 1)])
    assert "unknown setting 'sokcet'" in engine.log.read_text()
