"""Who listens at the socket: nothing is sent to a process of another user, or to a place where others can put one."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, Prompt, daemons, read, store, wait_until
from tokenlake import local_socket
from tokenlake.errors import ListenerUntrusted, Unreachable
from tokenlake_client import Pool
from tokenlake_server.explain import ask

NOBODY = 65534
TOKEN = "red-token-0123456789"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")

LISTENER = """
import os, socket, sys
path, uid = sys.argv[1], int(sys.argv[2])
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(path)
    os.chmod(path, 0o666)
    listener.listen()
    print("listens", flush=True)
    connection, _ = listener.accept()
    with connection:
        print(connection.recv(1 << 16).hex(), flush=True)
"""


class Listener:
    """A process of another user that listens at `path`, and tells what the first to connect sent."""

    def __init__(self, path: Path, uid: int = NOBODY) -> None:
        command = [sys.executable, "-c", LISTENER, str(path), str(uid)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "listens\n"

    def heard(self) -> bytes:
        """What it was sent before the connection, which must come, was closed."""
        out, _ = self._process.communicate(timeout=LIMIT_S)
        return bytes.fromhex(out)

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(ValueError):
            # It was read to its end.
            self._process.communicate()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp: every user may create files, and remove those of nobody else. Not below pytest's
    directory, which other users cannot enter."""
    with tempfile.TemporaryDirectory(prefix="tokenlake-") as directory:
        path = Path(directory)
        path.chmod(0o1777)
        yield path


@pytest.fixture
def forger(shared: Path) -> Iterator[tuple[Path, Listener]]:
    """A process of another user at a path that root gave it."""
    path = shared / "tokenlake-local.sock"
    listener = Listener(path)
    yield path, listener
    listener.end()


def by_pool(path: Path) -> None:
    Pool.connect(path, LAYOUT, TOKEN)


def by_explain(path: Path) -> None:
    ask(path, "request", TOKEN)


DOORS: dict[str, Callable[[Path], None]] = {"pool": by_pool, "explain": by_explain}


@as_root
@pytest.mark.parametrize("door", DOORS)
def test_a_listener_of_another_user_gets_no_token(forger: tuple[Path, Listener], door: str) -> None:
    path, listener = forger
    # As if it had been put there by root: the place is in order, the process is not.
    os.chown(path, 0, 0)
    with pytest.raises(ListenerUntrusted, match=f"process of uid {NOBODY} .*nothing was sent.*daemon_uid = {NOBODY}"):
        DOORS[door](path)
    assert listener.heard() == b""


@as_root
@pytest.mark.parametrize("door", DOORS)
def test_a_socket_that_another_user_put_in_a_shared_directory_is_not_dialled(
    forger: tuple[Path, Listener], door: str
) -> None:
    path, _ = forger
    with pytest.raises(ListenerUntrusted, match=f"belongs to uid {NOBODY}"):
        DOORS[door](path)


@as_root
def test_a_user_that_was_given_gets_the_token(forger: tuple[Path, Listener]) -> None:
    path, listener = forger
    with pytest.raises(Unreachable):
        Pool.connect(path, LAYOUT, TOKEN, daemon_uid=NOBODY)
    assert TOKEN.encode() in listener.heard()


@as_root
@pytest.mark.live
def test_a_pool_does_not_go_over_to_a_forger(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pool that reconnects sends its credential again."""
    with daemons() as cluster:
        node = cluster.nodes[0]
        path = shared / "s"
        # What the daemon's own checks refuse, an administrator may still do: put the socket where all can write.
        path.symlink_to(node.socket)
        with Pool.connect(path, LAYOUT) as pool:
            store(pool, Prompt(1, 2))
            node.kill()
            path.unlink()
            listener = Listener(path)
            try:
                os.chown(path, 0, 0)
                caplog.set_level(logging.WARNING)
                wait_until(lambda: f"process of uid {NOBODY}" in caplog.text, "the forger is named")
                assert listener.heard() == b""
                assert not pool.connected
            finally:
                listener.end()
            path.unlink()
            path.symlink_to(node.socket)
            node.start()
            cluster.wait_ready()
            wait_until(lambda: pool.connected, "connected again")
            store(pool, Prompt(2, 2))
            assert read(pool, Prompt(2, 2)) == 2
    assert caplog.text.count("process of uid") == 1


SERVE = """
import sys
from tokenlake import local_socket
local_socket.SYSTEM_DIRECTORY = sys.argv.pop(1)
from tokenlake_server.cli import serve
serve()
"""


@pytest.mark.live
def test_a_client_without_settings_finds_a_daemon_without_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root's daemon listens in the system's directory, any other in its user's."""
    system, runtime = tmp_path / "run", tmp_path / "user"
    runtime.mkdir(mode=0o700)
    monkeypatch.setattr(local_socket, "SYSTEM_DIRECTORY", str(system))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    flags = ["--memory", "1MiB", "--listen", "127.0.0.1:0", "--metrics", ""]
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen([sys.executable, "-c", SERVE, str(system), *flags], stderr=log)
    try:
        place = (system if os.geteuid() == 0 else runtime) / "tokenlake-local.sock"
        wait_until(lambda: place.exists() or daemon.poll() is not None, "the daemon listens")
        with Pool.connect(None, LAYOUT) as pool:
            assert pool.socket == place
            assert pool.node == "local"
    finally:
        daemon.terminate()
        daemon.wait(LIMIT_S)
