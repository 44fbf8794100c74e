"""Connecting: nothing is sent to a process of another user, or to a path where another user could listen."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, PATIENT, Prompt, daemons, read, store, wait_until
from tokenlake.errors import ListenerUntrusted, ProtocolRefused, Unreachable
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import PROTOCOL_VERSION, engine, local_socket, pack_frame
from tokenlake.wire.version import OLDEST_VERSION
from tokenlake_client import Pool
from tokenlake_client.link import Connector
from tokenlake_operator.explain import ask
from tokenlake_server.bulk.blocking_sockets import read_frame
from tokenlake_testing.cluster import Cluster

OTHER_USER = 65534
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
    """A process of another user that listens at `path` and prints what the first client sent."""

    def __init__(self, path: Path, uid: int = OTHER_USER) -> None:
        command = [sys.executable, "-c", LISTENER, str(path), str(uid)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "listens\n"

    def heard(self) -> bytes:
        """The bytes that the first client sent. Waits for a client to connect and to close."""
        out, _ = self._process.communicate(timeout=LIMIT_S)
        return bytes.fromhex(out)

    def end(self) -> None:
        self._process.kill()
        with contextlib.suppress(ValueError):
            # `heard` has read the output already.
            self._process.communicate()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like /tmp: all users may create files, and remove only their own. Not below pytest's directory, which
    other users cannot enter."""
    with tempfile.TemporaryDirectory(prefix="tokenlake-") as directory:
        path = Path(directory)
        path.chmod(0o1777)
        yield path


@pytest.fixture
def forger(shared: Path) -> Iterator[tuple[Path, Listener]]:
    """A process of another user that listens at the path of a daemon."""
    path = shared / "tokenlake-local.sock"
    listener = Listener(path)
    yield path, listener
    listener.end()


def by_pool(path: Path) -> None:
    Pool.connect(path, LAYOUT, TOKEN)


def by_explain(path: Path) -> None:
    ask(path, "request", TOKEN)


CLIENTS: dict[str, Callable[[Path], None]] = {"pool": by_pool, "explain": by_explain}


@as_root
@pytest.mark.parametrize("client", CLIENTS)
def test_a_listener_of_another_user_gets_no_token(forger: tuple[Path, Listener], client: str) -> None:
    path, listener = forger
    # Root owns the socket, so that the path is trusted; the listening process belongs to another user.
    os.chown(path, 0, 0)
    with pytest.raises(
        ListenerUntrusted, match=f"process of uid {OTHER_USER} .*nothing was sent.*daemon_uid = {OTHER_USER}"
    ):
        CLIENTS[client](path)
    assert listener.heard() == b""


@as_root
@pytest.mark.parametrize("client", CLIENTS)
def test_a_socket_of_another_user_is_not_dialled(forger: tuple[Path, Listener], client: str) -> None:
    path, _ = forger
    with pytest.raises(ListenerUntrusted, match=f"belongs to uid {OTHER_USER}"):
        CLIENTS[client](path)


@as_root
def test_the_given_daemon_uid_gets_the_token(forger: tuple[Path, Listener]) -> None:
    path, listener = forger
    with pytest.raises(Unreachable):
        Pool.connect(path, LAYOUT, TOKEN, daemon_uid=OTHER_USER)
    assert TOKEN.encode() in listener.heard()


@as_root
@pytest.mark.live
def test_a_pool_does_not_reconnect_to_a_forger(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pool that reconnects sends its credential again, after it has checked the listener again."""
    with daemons() as cluster:
        node = cluster.nodes[0]
        path = shared / "s"
        # The daemon does not create its socket in such a directory, but an administrator may link to the socket from
        # it.
        path.symlink_to(node.socket)
        with Pool.connect(path, LAYOUT, deadlines=PATIENT) as pool:
            store(pool, Prompt(1, 2))
            node.kill()
            path.unlink()
            listener = Listener(path)
            try:
                os.chown(path, 0, 0)
                caplog.set_level(logging.WARNING)
                wait_until(lambda: f"process of uid {OTHER_USER}" in caplog.text, "the forger is named")
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
from tokenlake.wire import local_socket
local_socket.SYSTEM_DIRECTORY = sys.argv.pop(1)
from tokenlake_server.cli import serve
serve()
"""


@pytest.mark.live
def test_client_and_daemon_without_settings_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon of root listens in the system's directory, that of another user in the user's directory."""
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
        with Pool.connect(None, LAYOUT, deadlines=PATIENT) as pool:
            assert pool.socket == place
            assert pool.node == "local"
    finally:
        daemon.terminate()
        daemon.wait(LIMIT_S)


def test_the_error_names_the_daemons_of_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM flag without a path looked for node `local` and did not say that a daemon of node `a` listens beside."""
    system, runtime = tmp_path / "run", tmp_path / "user"
    system.mkdir(mode=0o700)
    runtime.mkdir(mode=0o700)
    monkeypatch.setattr(local_socket, "SYSTEM_DIRECTORY", str(system))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    other = system / "tokenlake-a.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(other))
        for path in (None, system / "tokenlake-local.sock"):
            with pytest.raises(Unreachable, match=f"no daemon listens at .*; sockets here: {other}; connect to"):
                Pool.connect(path, LAYOUT)


@pytest.mark.parametrize(
    ("version", "probe", "refused"),
    [
        (PROTOCOL_VERSION + 1, b"", "chose protocol version"),
        (OLDEST_VERSION - 1, b"", "chose protocol version"),
        (PROTOCOL_VERSION, bytes(KEY_BYTES), "probe hash differs"),
    ],
)
def test_a_daemon_that_works_otherwise_is_refused(tmp_path: Path, version: int, probe: bytes, refused: str) -> None:
    """It uses a version that was not offered, or computes other keys."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as accepted:
                hello: Any = engine.request_decoder.decode(read_frame(accepted, engine.MAX_FRAME))
                welcome = engine.Welcome(
                    hello.id, version, "node", 1, 1, 1, "tenant", b"secret", probe, 3600.0, engine.MAX_FRAME
                )
                accepted.sendall(pack_frame(welcome))
                said.append(engine.request_decoder.decode(read_frame(accepted, engine.MAX_FRAME)))

        said: list[Any] = []
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ProtocolRefused, match=refused) as caught:
            Pool.connect(path, LAYOUT, deadlines=PATIENT)
        thread.join()
    assert said == [engine.Bye(str(caught.value))], "operators of the daemon see the reason"


@pytest.mark.live
def test_numbers_of_another_incarnation_are_ignored(cluster: Cluster) -> None:
    """Session and connection numbers that another incarnation of the daemon gave: at this one they may belong to
    another engine."""
    with cluster.connect(0, LAYOUT) as pool:
        connector = Connector(cluster.nodes[0].socket, None, LAYOUT, None, lambda: None, PATIENT)
        again = connector.connect(pool.engine.session, pool.link.connection, pool.engine.incarnation - 1)
        assert again.session != pool.engine.session
        again.channel.close()
        prompt = Prompt(8, 4)
        store(pool, prompt)
        assert read(pool, prompt) == 4, "its connection was not taken over"
        with Pool.connect(cluster.nodes[0].socket, LAYOUT, session=pool.engine.session, deadlines=PATIENT) as rank:
            assert rank.engine.session == pool.engine.session, "without an incarnation the number counts"
