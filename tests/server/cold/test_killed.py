"""SIGKILL in each phase of a writer: readers get the right bytes or misses, the bound holds, and objects without an
entry are found."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.cold.killed import SIZE
from tests.server.cold.scene import SLOT, Scene, served, stored_bytes, until
from tests.server.cold.test_store import writes
from tokenlake.wire import Code
from tokenlake_server.cold.sealed import object_bytes

PHASES = {
    "at an object": ("write", "objects", 5, ""),
    "between object and journal": ("write", "index/journal", 2, ""),
    "at a table": ("write", "index/table", 1, ""),
    "between table and root": ("write", "index/root", 1, ""),
    "at the second root": ("write", "index/root", 2, ""),
    "behind the root": ("list", "index/table", 1, "index/root"),
    "at the expiry": ("delete", "objects", 3, ""),
    "at a poll": ("list", "index", 20, ""),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_writer_that_is_killed(tmp_path: Path, phase: str) -> None:
    call, prefix, number, after = PHASES[phase]
    place = tmp_path / "place"
    place.mkdir()
    command = [sys.executable, "-m", "tests.server.cold.killed", str(place), call, prefix, str(number), after]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if ended.returncode != -signal.SIGKILL:
        pytest.fail(f"the phase did not come: {ended.returncode}\n{ended.stderr[-2000:]}")
    size = SIZE * object_bytes(SLOT)
    assert stored_bytes(place) <= size
    with served(Scene(place, size=size)) as scene:
        for segment in range(0, 200):
            code = scene.read([segment])
            assert code in (bytes([Code.LOCAL]), bytes([Code.LOST])), segment
        for folder in range(256):
            scene.session.upkeep.scan(folder)
        scene.store.index.check_integrity()
        whole = scene.files()
        assert len(whole) == scene.store.state.objects
        writes(scene, [5000])
        until(lambda: stored_bytes(place) <= size, "the bound holds")
