"""Installing the client beside vLLM changes none of vLLM's packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live


def test_no_version_changed() -> None:
    lines = Path(sys.prefix, "before-the-client.txt").read_text().splitlines()
    # Where the client is installed anew, the list names its earlier commit.
    before = [line for line in lines if not line.startswith("-e ")]
    command = [sys.executable, "-m", "pip", "freeze"]
    now = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(before) > 50
    assert sorted(set(before) - set(now)) == []
