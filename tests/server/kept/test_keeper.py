"""The keeper holds descriptors by name, for one daemon after the other, and ends when no daemon comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LIMIT_S, wait_until
from tokenlake_server import keeper
from tokenlake_server.kept.keeper_process import KeeperProcess, KeeperUnusable, end_keeper

pytestmark = pytest.mark.live


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    yield str(tmp_path / "x.keeper")
    end_keeper(str(tmp_path / "x.keeper"))


def memory(text: bytes) -> int:
    number = os.memfd_create("test")
    os.write(number, text)
    return number


def content(number: int) -> bytes:
    return os.pread(number, 100, 0)


def ended(pid: int) -> int:
    """Wait until a keeper that this process started has ended; its status."""
    found = [(0, 0)]

    def has_ended() -> bool:
        found[0] = os.waitpid(pid, os.WNOHANG)
        return found[0][0] == pid

    wait_until(has_ended, "the keeper has ended")
    return found[0][1]


def gone(path: str) -> bool:
    return not Path(path).exists()


def test_the_next_daemon_gets_what_was_held(path: str) -> None:
    first = KeeperProcess(path, 60)
    assert first.taken == {}
    one, other = memory(b"one"), memory(b"other")
    first.hold("one", one)
    first.hold("other", other)
    first.hold("third", other)
    first.drop("third")
    assert first.complete
    first.close()
    os.close(one)
    second = KeeperProcess(path, 60)
    assert {name: content(number) for name, number in second.taken.items()} == {"one": b"one", "other": b"other"}
    assert not any(os.get_inheritable(number) for number in second.taken.values())
    assert os.stat(path).st_mode & 0o777 == 0o600
    second.drop_all()
    second.close()
    wait_until(lambda: gone(path), "a keeper without memory ends")


def test_many_descriptors(path: str) -> None:
    first = KeeperProcess(path, 60)
    number = memory(b"x")
    for at in range(3000):
        first.hold(f"{at}", number)
        while not first.complete:
            first._flush()
    first.close()
    second = KeeperProcess(path, 60)
    assert list(second.taken) == [f"{at}" for at in range(3000)]
    for each in second.taken.values():
        os.close(each)
    second.close()


def test_what_was_dropped_before_the_keeper_read_it(path: str) -> None:
    """The descriptor is closed then."""
    store = KeeperProcess(path, 60)
    os.kill(store.pid, signal.SIGSTOP)
    number = memory(b"x")
    at = 0
    while store.complete:
        at += 1
        store.hold(f"{at}", number)
    closed = memory(b"closed")
    store.hold("closed", closed)
    store.drop("closed")
    os.close(closed)
    os.kill(store.pid, signal.SIGCONT)

    def sent() -> bool:
        store._flush()
        return store.complete

    wait_until(sent, "the keeper has read everything")
    store.close()
    second = KeeperProcess(path, 60)
    assert list(second.taken) == [f"{each + 1}" for each in range(at)]
    for each in second.taken.values():
        os.close(each)
    second.drop_all()
    second.close()


def test_the_time_is_over(path: str) -> None:
    store = KeeperProcess(path, 0.01)
    store.hold("one", memory(b"one"))
    store.close()
    assert ended(store.pid) == 0
    assert gone(path)


def test_a_keeper_that_cannot_be_reached_ends(path: str) -> None:
    store = KeeperProcess(path, 600)
    store.hold("one", memory(b"one"))
    os.unlink(path)
    store.close()
    assert ended(store.pid) == 0


def test_a_second_daemon_is_told_to_wait(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = KeeperProcess(path, 60)
    monkeypatch.setattr("tokenlake_server.kept.keeper_process.BUSY_S", 0.1)
    with pytest.raises(KeeperUnusable, match="serves another daemon"):
        KeeperProcess(path, 60)
    first.close()
    KeeperProcess(path, 60).close()


def test_another_user_gets_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeeperProcess(path, 60)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(KeeperUnusable, match="a process of another user listens"):
        KeeperProcess(path, 60)
    store.close()


def test_a_daemon_that_keeps_nothing_ends_it(path: str) -> None:
    store = KeeperProcess(path, 600)
    store.hold("one", memory(b"one"))
    store.close()

    def told() -> bool:
        end_keeper(path)
        return gone(path)

    wait_until(told, "it has ended")
    assert ended(store.pid) == 0


def test_one_that_a_person_started_stays(path: str) -> None:
    command = [sys.executable, "-m", "tokenlake_server.keeper", path]
    with subprocess.Popen(command) as process:
        wait_until(lambda: Path(path).exists(), "it listens")
        for _ in range(2):
            store = KeeperProcess(path, 0.01)
            assert store.taken == {}
            assert not store.pid, "it did not start another one"
            store.hold("one", memory(b"one"))
            store.drop_all()
            store.close()
        again = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert "listens at" in again.stderr
        assert again.returncode == 1
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        assert int(resident.split()[1]) < 40 << 10, "it takes a few MiB"
        process.terminate()


def test_it_imports_the_standard_library_alone() -> None:
    code = "import sys; import tokenlake_server.keeper; print([n for n in sys.modules if n in ('numpy', 'msgspec')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    assert keeper.packet(b"hold", b"x") == b"hold\0x"
