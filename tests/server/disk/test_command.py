"""`tokenlake disk inspect`, `verify` and `wipe`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.server.disk.test_store import NEW, filled
from tokenlake_server.disk.command import disk
from tokenlake_server.disk.files import DirectoryFiles


def run(*arguments: str, environ: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(disk, arguments, env=environ or {})


def test_inspect(tmp_path: Path) -> None:
    filled(DirectoryFiles(tmp_path), count=5)
    files = DirectoryFiles(tmp_path)  # a daemon that runs
    result = run("inspect", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "cluster c, node node, not encrypted" in result.output
    assert result.output.splitlines()[2].split()[:3] == ["default", "4,096", "5"]
    answer = json.loads(run("inspect", str(tmp_path), "--json").output)
    assert answer["slabs"][0]["segments"] == 5
    assert answer["slabs"][0]["keys"] == {"none": 5}
    files.close()


def test_a_directory_without_a_tier(tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        result = run(command, str(tmp_path))
        assert result.exit_code == 1
        assert "no directory of a disk tier" in result.output


@pytest.mark.parametrize("keys", [(), (NEW,)])
def test_verify_finds_a_changed_byte(tmp_path: Path, keys: tuple[bytes, ...]) -> None:
    filled(DirectoryFiles(tmp_path), *keys, count=5)
    environ = {"TOKENLAKE_DISK_KEYS": ",".join(key.hex() for key in keys)}
    result = run("verify", str(tmp_path), environ=environ)
    assert result.exit_code == 0, result.output
    assert "5 segments are sound, 0 are not" in result.output
    slab = tmp_path / "slab-00000"
    with slab.open("r+b") as file:
        file.seek(4096 + 8192 + 5000)
        byte = file.read(1)
        file.seek(4096 + 8192 + 5000)
        file.write(bytes([byte[0] ^ 1]))
    result = run("verify", str(tmp_path), "--json", environ=environ)
    assert result.exit_code == 1
    answer = json.loads(result.output)
    assert (answer["sound"], answer["differ"]) == (4, 1)
    assert "place 1 of tenant 'default'" in answer["first"]


def test_verify_without_the_key(tmp_path: Path) -> None:
    filled(DirectoryFiles(tmp_path), NEW)
    result = run("verify", str(tmp_path))
    assert result.exit_code == 1
    assert "is not configured" in result.output


def test_a_running_daemon_keeps_its_files(tmp_path: Path) -> None:
    filled(DirectoryFiles(tmp_path))
    files = DirectoryFiles(tmp_path)
    for command in (("verify",), ("wipe", "--yes")):
        result = run(*command, str(tmp_path))
        assert result.exit_code == 1
        assert "in use by process" in result.output
    files.close()


def test_wipe_removes_the_files_of_the_tier_only(tmp_path: Path) -> None:
    filled(DirectoryFiles(tmp_path))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "aside-1-slab-00000").write_text("old")
    assert "removed 1 files" in run("wipe", "--aside", "--yes", str(tmp_path)).output
    assert run("inspect", str(tmp_path)).exit_code == 0
    assert CliRunner().invoke(disk, ("wipe", str(tmp_path)), input="n\n").exit_code == 1
    assert run("inspect", str(tmp_path)).exit_code == 0
    result = run("wipe", "--yes", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "notes.txt"]
    assert "no such files" in run("wipe", "--yes", str(tmp_path)).output
