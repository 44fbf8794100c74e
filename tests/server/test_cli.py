"""`tokenlake serve` refuses wrong settings with a reason and leaves nothing behind; signals; what a terminal shows."""

from __future__ import annotations

import os
import pty
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, Prompt, daemons, pid_of, store, wait_until
from tokenlake.errors import ConfigurationError
from tokenlake_server.start.config_file import read_config_file
from tokenlake_server.start.running import IGNORED
from tokenlake_testing.cluster import Node

pytestmark = pytest.mark.live

SERVE = [sys.executable, "-m", "tokenlake_server"]
COMMAND = [sys.executable, "-c", "from tokenlake.command import main; main()"]


def run(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=clean | environment, check=False
    )


def words(tmp_path: Path, **settings: str) -> list[str]:
    """The flags of a small daemon, with these settings."""
    given = {"node": "x", "memory": "1MiB", "socket": str(tmp_path / "x.sock"), "listen": "127.0.0.1:0", "metrics": ""}
    given |= {name.replace("_", "-"): value for name, value in settings.items()}
    return [word for name, value in given.items() for word in (f"--{name}", value)]


def refused(tmp_path: Path, *expected: str, **settings: str) -> None:
    """A daemon with these settings does not start: its error has these texts, and it leaves no socket."""
    ended = run([*SERVE, *words(tmp_path, **settings)])
    assert ended.returncode in (1, 2), ended
    assert "Traceback" not in ended.stderr, ended.stderr
    assert [text for text in expected if text not in ended.stderr] == [], ended.stderr
    assert not (tmp_path / "x.sock").exists()


def test_settings_that_are_wrong(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    refused(tmp_path, "No such option", "--socket", sokcet="x")
    file.write_text("node = 'x'\nmemory = \n")
    refused(tmp_path, str(file), "line 2", config=str(file))
    file.write_bytes(b"node = 'x'\n# caf\xe9\n")
    refused(tmp_path, f"'{file}' is not in UTF-8, from line 2 on: save it", config=str(file))
    file.write_text(f"cluster_secret = '{'aa' * 32}'\n")
    refused(tmp_path, "chmod 600", config=str(file))
    refused(tmp_path, str(tmp_path / "none.toml"), config=str(tmp_path / "none.toml"))
    refused(tmp_path, "'memory' asks for 1TiB", "available", memory="1TiB")
    # Also for root, which the modes of directories do not stop.
    refused(tmp_path, "setting 'state_directory' is '/proc'", state_directory="/proc")
    missing = tmp_path / "none"
    refused(tmp_path, f"'{missing}'; expected a directory that exists", state_directory=str(missing))
    assert not missing.exists()
    for address in ("0.0.0.0:0", "[::]:0"):
        refused(tmp_path, "'listen'", "loopback", "'certificate'", listen=address)


def test_a_file_with_secrets_that_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    secret = "aa" * 32
    for text, named in (
        (f"cluster_secret = '{secret}'\n", "cluster_secret"),
        (f"[[tenants]]\nname = 'a'\nsecret = '{secret}'\n", "tenants"),
    ):
        file.write_text(text)
        for mode in (0o644, 0o640, 0o602):
            file.chmod(mode)
            with pytest.raises(ConfigurationError, match=f"sets '{named}', and with mode {mode:04o}") as caught:
                read_config_file(file)
            assert "aaaa" not in str(caught.value)
    for mode, text in ((0o644, "cluster_secret = ''\n"), (0o600, f"cluster_secret = '{secret}'\n")):
        file.write_text(text)
        file.chmod(mode)
        assert read_config_file(file) == text
    file.write_bytes(b'\xef\xbb\xbfnode = "b"\n')
    assert read_config_file(file) == 'node = "b"\n', "a byte order mark is no part of the file"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, which gives files to groups")
def test_a_file_with_secrets_that_root_gave_to_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a Secret of Kubernetes belong to root and, with `fsGroup`, to a group of the container."""
    file, user, group = tmp_path / "tokenlake.toml", 1234, 4321
    file.write_text(f"cluster_secret = '{'aa' * 32}'\n")
    for owner, mode, reader, groups, taken in (
        (0, 0o640, user, [group], True),
        (0, 0o440, user, [group], True),
        (0, 0o660, user, [group], False),
        (0, 0o644, user, [group], False),
        (0, 0o640, user, [], False),
        (0, 0o640, 0, [group], False),
        (user, 0o640, user, [group], False),
    ):
        os.chown(file, owner, group)
        file.chmod(mode)
        for name, value in {"getuid": reader, "getegid": reader, "getgroups": groups}.items():
            monkeypatch.setattr(os, name, lambda value=value: value)
        try:
            read_config_file(file)
            found = True
        except ConfigurationError:
            found = False
        assert found == taken, (oct(mode), owner, reader, groups)


@pytest.mark.parametrize("there", [True, False])
def test_the_runtime_directory_of_another_user(there: bool, tmp_path: Path) -> None:
    """As after `su`, or in a container: the message names the variable that gave the default."""
    runtime = tmp_path / "run"
    if there and os.geteuid():
        pytest.skip("needs root")
    if there:
        runtime.mkdir()
        os.chown(runtime, 12345, 12345)
    program = "import os, sys; os.geteuid = lambda: 4321\nfrom tokenlake_server.cli import serve; serve(sys.argv[1:])"
    flags = ["--node", "x", "--memory", "1MiB", "--listen", "127.0.0.1:0", "--metrics", ""]
    ended = run([sys.executable, "-c", program, *flags], XDG_RUNTIME_DIR=str(runtime))
    assert ended.returncode == 1
    assert "(set by default, in the directory of the variable XDG_RUNTIME_DIR)" in ended.stderr


def test_huge_pages_that_were_not_set_aside(tmp_path: Path) -> None:
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("HugePages_Free"))
    if int(free.split()[1]):
        pytest.skip("this machine has huge pages")
    refused(tmp_path, "'huge_pages'", "sysctl vm.nr_hugepages", memory="2MiB", huge_pages="true")


def test_addresses_in_use(tmp_path: Path, node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        for setting in ("listen", "metrics"):
            refused(tmp_path, f"'{setting}'", taken, **{setting: taken})
    for more in ({}, {"listen": taken}):
        refused(tmp_path, "'socket'", "the daemon of this node runs already", socket=str(node.socket), **more)
    for setting in ("listen", "metrics"):
        foreign = {setting: "192.0.2.1:5000", "unencrypted_beyond_loopback": "true"}
        expected = f"setting '{setting}' is '192.0.2.1:5000'"
        refused(tmp_path, expected, "no interface of this machine has this one", **foreign)
    (tmp_path / "a-file").write_text("mine")
    refused(tmp_path, "'socket'", socket=str(tmp_path / "a-file"))
    assert (tmp_path / "a-file").read_text() == "mine"
    for setting in ("socket", "control_socket"):
        path = {setting: str(tmp_path / "no" / "such" / "directory.sock")}
        refused(tmp_path, f"'{setting}'", "a path that can be created (No such file or directory)", **path)


def test_stale_sockets_and_clean_stops() -> None:
    with daemons() as cluster:
        node = cluster.nodes[0]
        node.kill()
        assert stat.S_ISSOCK(node.socket.stat().st_mode), "a killed daemon leaves its socket"
        node.start()
        cluster.wait_ready()
        assert stat.S_IMODE(node.socket.stat().st_mode) == 0o660
        # logrotate and operators send some of these.
        for number in IGNORED:
            os.kill(pid_of(node), number)
            wait_until(lambda: f"{number.name} has no effect" in node.log.read_text(), number.name)  # noqa: B023
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, Prompt(1, 2))
            assert node.stop() == 0
            assert not node.socket.exists()
        node.start()
        cluster.wait_ready()
        assert node.process is not None
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(LIMIT_S) == 0


@pytest.mark.parametrize("command", [SERVE, [*COMMAND, "serve"]], ids=["module", "command"])
def test_a_sigterm_before_the_daemon_runs(command: list[str], tmp_path: Path) -> None:
    """Process 1 of a container gets only signals that it handles."""
    with subprocess.Popen([*command, *words(tmp_path)], stderr=subprocess.PIPE) as daemon:
        status = Path(f"/proc/{daemon.pid}/status")

        def handles_it() -> bool:
            caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

        wait_until(handles_it, "SIGTERM is handled")
        daemon.terminate()
        assert daemon.stderr is not None
        assert daemon.stderr.read() == b""
    assert daemon.returncode == 0


def test_a_terminal_shows_that_memory_is_prepared(tmp_path: Path) -> None:
    """A terminal that is closed sends SIGHUP."""
    ours, theirs = pty.openpty()
    with (
        subprocess.Popen([*SERVE, *words(tmp_path, memory="64MiB")], stderr=theirs) as daemon,
        os.fdopen(ours, "rb", 0) as terminal,
    ):
        os.close(theirs)
        shown = b""
        while b"is ready after" not in shown:
            shown += terminal.read(1 << 16)
        daemon.send_signal(signal.SIGHUP)
    assert daemon.returncode == 0
    assert b"preparing memory" in shown


def test_a_pipe_gets_every_value_whole() -> None:
    path = "/" + "long/" * 40 + "ca.pem"
    shown = run([*COMMAND, "config", "show", "--ca", path, "--certificate", path, "--key", path], COLUMNS="60")
    assert shown.stdout.count(path) == 3, shown
    assert "unencrypted_beyond_loopback" in shown.stdout
