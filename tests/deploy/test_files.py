"""The unit of systemd and the files of images: what programs say of them that check such files, and that limits fit the
daemon."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.chart import ROOT
from tokenlake.config import ServerConfig, load_config
from tokenlake_server.start.running import LATE_S, OWN_DESCRIPTORS, REGION_DESCRIPTORS

UNIT = ROOT / "deploy" / "systemd" / "tokenlake.service"
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def entries() -> dict[str, str]:
    """The entries of the unit; of those with several lines the last one."""
    pairs = (line.partition("=") for line in UNIT.read_text().splitlines() if "=" in line and not line.startswith("#"))
    return {name: value for name, _, value in pairs}


@needs_systemd
def test_exposure() -> None:
    ended = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-200:]


@needs_systemd
def test_every_entry_is_known(tmp_path: Path) -> None:
    """With a program that exists on this machine."""
    program = entries()["ExecStart"].split()[0]
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace(program, "/bin/true").replace("User=tokenlake", "User=root"))
    ended = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    about_it = [line for line in ended.stderr.splitlines() if UNIT.name in line]
    assert not about_it


def test_limits() -> None:
    unit = entries()
    assert unit["Type"] == "notify"
    assert int(unit["WatchdogSec"]) > 0
    # The largest memory that machines have, and as many processes of engines as the default allows.
    config = load_config(toml_text='memory = "4TiB"', environ={}, flags={}, uid=1000).config
    descriptors = OWN_DESCRIPTORS + REGION_DESCRIPTORS * config.regions + 2 * 16 * config.max_sessions
    assert int(unit["LimitNOFILE"]) >= descriptors
    assert unit["LimitMEMLOCK"] == "infinity"
    defaults = ServerConfig()
    assert int(unit["TimeoutStopSec"]) > 60 + defaults.disk_save_s + LATE_S, "a drain of a minute"
    assert unit["RuntimeDirectory"] == "tokenlake"


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed: make install-chart")
def test_the_files_of_images() -> None:
    files = sorted((ROOT / "deploy" / "image").glob("Containerfile*"))
    assert len(files) == 2
    ended = subprocess.run([str(HADOLINT), *files], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
