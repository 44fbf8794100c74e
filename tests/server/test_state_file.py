"""Eviction statistics survive a restart, and a damaged file is ignored."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, Prompt, daemons, outcomes, read, store, wait_told
from tokenlake.core.cluster.learned import MAX_LEARNED_BYTES
from tokenlake.wire import Code
from tokenlake_server.start.state_file import StateFile
from tokenlake_testing.event_log import replay


def test_saved_statistics_are_loaded(tmp_path: Path) -> None:
    StateFile(tmp_path, "a").save(b"something")
    StateFile(tmp_path, "b").save(b"something else")
    assert StateFile(tmp_path, "a").load() == b"something"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["learned-a", "learned-b"]


def test_no_file(tmp_path: Path) -> None:
    assert StateFile(tmp_path, "a").load() is None


def test_equal_statistics_are_not_written_again(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "a")
    file.save(b"something")
    file.path.unlink()
    file.save(b"something")
    assert not file.path.exists()
    file.save(b"something else")
    assert file.load() == b"something else"


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data.replace(b" 1\n", b" 2\n"),
        lambda data: bytes(data[:30]) + bytes([data[30] ^ 1]) + data[31:],
        lambda data: data[:20],
        lambda data: data + bytes(MAX_LEARNED_BYTES),
    ],
)
def test_a_damaged_file_is_not_used(damage: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile(tmp_path, "a")
    file.save(b"something that was learned")
    file.path.write_bytes(damage(file.path.read_bytes()))  # type: ignore[operator]
    assert file.load() is None
    assert "damaged, or of another version" in caplog.text
    fresh = StateFile(tmp_path, "a")
    fresh.save(b"anew")
    assert fresh.load() == b"anew"


def test_a_missing_directory_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = StateFile(tmp_path / "nowhere", "a")
    assert file.load() is None
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            file.save(bytes([number]))
    assert caplog.text.count("cannot be saved") == 1


@pytest.mark.live
def test_statistics_survive_a_restart_and_the_log_replays(tmp_path: Path) -> None:
    record = tmp_path / "record"
    with daemons(1, memory="2MiB", state_directory=str(tmp_path)) as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as pool:
            for number in range(10):
                assert outcomes(store(pool, Prompt(number, 3))) == {Code.COMMITTED}
        wait_told(cluster)
        assert node.stop() == 0
        learned = StateFile(tmp_path, node.name).load()
        assert learned is not None
        node.start("tests.recording_daemon", record=str(record))
        cluster.wait_ready()
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, Prompt(1, 3))
            assert read(pool, Prompt(1, 3)) == 3
        assert node.stop() == 0
        assert f"continues with {len(learned)} bytes" in node.log.read_text()
    replayed = replay(record)
    assert replayed.events > 5
    assert not replayed.difference


@pytest.mark.live
def test_a_daemon_starts_on_damaged_statistics(tmp_path: Path) -> None:
    with daemons(1, state_directory=str(tmp_path)) as cluster:
        node = cluster.nodes[0]
        assert node.stop() == 0
        StateFile(tmp_path, node.name).save(b"statistics of another version")
        node.start()
        cluster.wait_ready()
        with cluster.connect(0, LAYOUT) as pool:
            assert outcomes(store(pool, Prompt(1, 3))) == {Code.COMMITTED}
        assert node.stop() == 0
        assert "refused: not eviction statistics" in node.log.read_text()
