"""`tokenlake cold`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.server.cold.bucket import BUCKET, needs_s3, of_server, s3_server
from tests.server.cold.scene import SECRETS, SLOT, Scene, object_of, served, until
from tests.server.cold.test_store import writes
from tokenlake_server.cold.command import cold
from tokenlake_server.cold.places import open_place
from tokenlake_server.cold.sealed import object_bytes


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cold, [str(each) for each in arguments])


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A place with 12 objects of the tenant `a` and one of `b`."""
    path = tmp_path / "place"
    path.mkdir()
    with served(Scene(path)) as scene:
        writes(scene, list(range(12)))
        writes(scene, [1], "b")
    return path


@pytest.fixture
def config(tmp_path: Path, place: Path) -> Path:
    """A configuration that knows the tenant `a`."""
    file = tmp_path / "config.toml"
    file.write_text(
        f'cold = "{place}"\ncold_size = "64MiB"\n[[tenants]]\nname = "a"\nsecret = "{SECRETS["a"].hex()}"\nuids = [0]\n'
    )
    file.chmod(0o600)
    return file


def test_inspect_counts_by_tenant_and_age(config: Path) -> None:
    result = run("inspect", "--config", config)
    assert result.exit_code == 0, result.output
    assert "13 objects" in result.output
    assert "another tenant  64KiB    1" in result.output
    answer = json.loads(run("inspect", "--config", config, "--json").output)
    assert (answer["objects"], answer["bytes"], answer["size"]) == (13, 13 * object_bytes(SLOT), 64 << 20)
    assert answer["last_use"] == {"the last hour": 13, "the last day": 0, "the last week": 0, "before": 0}
    assert [(each["tenant"], each["objects"]) for each in answer["groups"]] == [("a", 12), ("another tenant", 1)]


def test_inspect_changes_nothing(config: Path, place: Path) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    run("inspect", "--config", config)
    run("verify", "--config", config, "--all")
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_verify_finds_damage_of_known_tenants(config: Path, place: Path) -> None:
    result = run("verify", "--config", config, "--all")
    assert result.exit_code == 0, result.output
    assert "sound: 12; of tenants that are not known here: 1; missing: 0; damaged: 0" in result.output
    scene = Scene(place)
    for number, at in ((3, 60_000), (4, 20)):
        data = bytearray(object_of(scene, number).read_bytes())
        data[at] ^= 1
        object_of(scene, number).write_bytes(data)
    object_of(scene, 5).unlink()
    result = run("verify", "--config", config, "--all")
    assert result.exit_code == 1
    assert "sound: 9;" in result.output
    assert "missing: 1; damaged: 2" in result.output
    answer = json.loads(run("verify", "--config", config, "--sample", "13", "--json").output)
    assert len(answer["damaged"]) == 2


def test_expire_by_size_and_by_age(config: Path, place: Path) -> None:
    assert "expected --days or --to-size" in run("expire", "--config", config).output
    assert run("expire", "--config", config, "--days", "0").exit_code == 1
    result = run("expire", "--config", config, "--to-size", str(5 * object_bytes(SLOT)), "--yes")
    assert result.exit_code == 0, result.output
    assert "8 objects deleted" in result.output
    scene = Scene(place)
    assert len(scene.files()) == 5
    with served(scene):
        assert sum(scene.look(list(range(12))) + scene.look([1], "b")) == 5
    answer = json.loads(run("expire", "--config", config, "--days", "0.5", "--yes", "--json").output)
    assert answer == {"deleted": 0, "bytes": 0, "objects": 5}


def test_running_nodes_hear_of_an_expiry(config: Path, place: Path) -> None:
    with served(Scene(place)) as scene:
        assert scene.look([1, 2]) == [1, 1]
        run("expire", "--config", config, "--to-size", "0", "--yes")
        until(lambda: scene.look([1, 2]) == [0, 0], "the node hears of it")


def test_errors_name_the_cure(tmp_path: Path) -> None:
    assert "give --cold" in run("inspect").output
    result = run("inspect", "--cold", tmp_path / "missing")
    assert result.exit_code == 1
    assert "No such file or directory" in result.output
    assert "absolute path of a directory" in run("inspect", "--cold", "relative").output
    empty = run("inspect", "--cold", tmp_path)
    assert "0 objects" in empty.output
    assert empty.exit_code == 0


@needs_s3
def test_a_bucket(tmp_path: Path) -> None:
    with s3_server(tmp_path / "log") as bucket, of_server(bucket.variables):
        place = f"s3://{BUCKET}/c"
        with served(Scene(tmp_path, inner=lambda: open_place(place))) as scene:
            writes(scene, [1, 2, 3])
        assert "3 objects" in run("inspect", "--cold", place).output
        assert "tenants that are not known here: 3" in run("verify", "--cold", place).output
        assert "3 objects deleted" in run("expire", "--cold", place, "--to-size", "0", "--yes").output
        assert "0 objects" in run("inspect", "--cold", place).output
