"""The daemon's local socket: directories and sockets that it creates, replaces and refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from tokenlake.config import ServerConfig
from tokenlake.errors import ConfigurationError, ListenerUntrusted
from tokenlake.wire import local_socket as rules
from tokenlake_client.dial import dial
from tokenlake_server.engines.local_socket import listen, prepare
from tokenlake_server.start.running import _out_of_a_shared_directory

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


def left_behind(path: Path, uid: int = -1) -> None:
    """The socket of a process that is gone."""
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    os.chown(path, uid, -1)


def refused(path: Path) -> str:
    # Without the times: a connection changes that of the last access.
    before = path.lstat()[:7] if path.is_symlink() or path.exists() else None
    with pytest.raises(ConfigurationError) as caught:
        listen(path)
    assert caught.value.field == "socket"
    assert (path.lstat()[:7] if before else None) == before, "the refused path was changed"
    return str(caught.value)


def test_the_socket_is_for_its_user_and_group(tmp_path: Path) -> None:
    with listen(tmp_path / "s"):
        assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660


def test_only_the_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    left_behind(tmp_path / "s")
    with listen(tmp_path / "s"):
        assert "no daemon listens" in refused(tmp_path / "s")


def test_a_stopped_daemon_still_listens(tmp_path: Path) -> None:
    """It accepts no connections, and its queue is full. A second daemon does not wait for it."""
    with socket.socket(socket.AF_UNIX) as stopped, contextlib.ExitStack() as waiting:
        stopped.bind(str(tmp_path / "s"))
        stopped.listen(0)
        full = False
        while not full:
            engine = waiting.enter_context(socket.socket(socket.AF_UNIX))
            engine.setblocking(False)
            full = engine.connect_ex(str(tmp_path / "s")) == errno.EAGAIN
        assert "no daemon listens" in refused(tmp_path / "s")


@as_root
def test_the_socket_of_another_user_is_left_alone(tmp_path: Path) -> None:
    left_behind(tmp_path / "s", NOBODY)
    assert f"another user, uid {NOBODY}" in refused(tmp_path / "s")


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    """A link is refused, also a link to the socket of a dead daemon. The daemon would replace that socket itself."""
    left_behind(tmp_path / "elsewhere")
    (tmp_path / "s").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refused(tmp_path / "s")
    assert (tmp_path / "elsewhere").is_socket()


@as_root
def test_a_directory_that_others_can_change_is_refused(tmp_path: Path) -> None:
    foreign, open_to_all = tmp_path / "foreign", tmp_path / "open"
    for directory in (foreign, open_to_all):
        (directory / "in").mkdir(parents=True)
    os.chown(foreign, NOBODY, -1)
    open_to_all.chmod(0o777)
    assert f"{foreign} belongs to uid {NOBODY}" in refused(foreign / "in" / "s")
    assert f"chmod go-w {open_to_all}" in refused(open_to_all / "in" / "s")
    link = tmp_path / "link"
    link.symlink_to(foreign)
    assert f"{foreign} belongs" in refused(link / "in" / "s")


def test_a_default_directory_ignores_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "SYSTEM_DIRECTORY", str(tmp_path / "run"))
    before = os.umask(0o077)
    try:
        with listen(tmp_path / "run" / "s"):
            assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755
            with dial(tmp_path / "run" / "s", None, 1.0)[0] as sock:
                assert sock.getpeername() == str(tmp_path / "run" / "s")
    finally:
        os.umask(before)
    assert "can be created" in refused(tmp_path / "other" / "s"), "no other directory is made"


@as_root
def test_a_directory_that_the_user_cannot_write() -> None:
    """As a hostPath that Kubernetes made: the error names the cure."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(ConfigurationError, match=f"chown {NOBODY} {place}"):
                listen(Path(place) / "s")
        finally:
            os.seteuid(0)


def test_a_directory_that_a_pod_shares(tmp_path: Path) -> None:
    """An emptyDir: engines check the process that listens; what connects by the path alone does not trust it."""
    path = tmp_path / "volume" / "tokenlake-a.sock"
    path.parent.mkdir()
    path.parent.chmod(0o2777)
    with listen(path):
        dial(path, None, 1.0)[0].close()
        with pytest.raises(ListenerUntrusted, match="chmod go-w"):
            dial(path, None, 1.0, by_path=True)
    with pytest.raises(ConfigurationError, match="chmod go-w"):
        prepare(path.with_suffix(".control"), "control_socket")


def test_the_control_socket_of_a_shared_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default is a directory of the user alone. One that was given stays, and is refused."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("tokenlake_server.start.running.prepare", lambda path, setting: None)
    shared = tmp_path / "volume"
    shared.mkdir()
    config = ServerConfig(node="a", socket=str(shared / "a.sock"), control_socket=str(shared / "a.control"))
    assert _out_of_a_shared_directory(config, {}) == config
    shared.chmod(0o777)
    moved = _out_of_a_shared_directory(config, {})
    assert moved.control_socket == str(tmp_path / "tokenlake-a.control")
    assert _out_of_a_shared_directory(config, {"control_socket": "flag --control-socket"}) == config
