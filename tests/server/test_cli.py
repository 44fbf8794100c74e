"""`tokenlake serve` refuses wrong settings with a reason and leaves nothing behind."""

from __future__ import annotations

import os
import pty
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness.live import LAYOUT, LIMIT_S, Prompt, daemons, store, wait_until
from tokenlake.errors import ConfigurationError
from tokenlake_server.start.config_file import read_config_file
from tokenlake_server.start.running import IGNORED
from tokenlake_testing.cluster import Node

pytestmark = pytest.mark.live

SERVE = [sys.executable, "-m", "tokenlake_server"]
COMMAND = [sys.executable, "-c", "from tokenlake.command import main; main()"]


def start(tmp_path: Path, *flags: str, environment: dict[str, str] | None = None) -> str:
    """The error of a daemon that does not start; its status must be 1 or 2, without a traceback."""
    given = {word for word in flags if word.startswith("--")}
    defaults = {
        "--node": "x",
        "--memory": "1MiB",
        "--socket": str(tmp_path / "x.sock"),
        "--listen": "127.0.0.1:0",
        "--metrics": "",
    }
    words = [word for name, value in defaults.items() if name not in given for word in (name, value)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
    ended = subprocess.run(
        [*SERVE, *words, *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=clean | (environment or {}),
        check=False,
    )
    assert ended.returncode in (1, 2), ended
    assert "Traceback" not in ended.stderr, ended.stderr
    assert not (tmp_path / "x.sock").exists()
    return ended.stderr


def test_settings_that_are_wrong(tmp_path: Path) -> None:
    flag = start(tmp_path, "--sokcet", "x")
    assert "No such option" in flag
    assert "--socket" in flag
    assert "TOKENLAKE_MEMROY" in start(tmp_path, environment={"TOKENLAKE_MEMROY": "1GiB"})
    file = tmp_path / "tokenlake.toml"
    file.write_text("memroy = '1GiB'\n")
    message = start(tmp_path, "--config", str(file))
    assert "memroy" in message
    assert "'memory'" in message
    file.write_text("node = 'x'\nmemory = \n")
    message = start(tmp_path, "--config", str(file))
    assert str(file) in message
    assert "line 2" in message
    file.write_bytes(b"node = 'x'\n# caf\xe9\n")
    assert f"'{file}' is not in UTF-8, from line 2 on: save it" in start(tmp_path, "--config", str(file))
    assert str(tmp_path / "none.toml") in start(tmp_path, "--config", str(tmp_path / "none.toml"))


def test_a_file_with_secrets_that_others_may_read(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    for secrets, named in (
        (f"cluster_secret = '{'aa' * 32}'\n", "cluster_secret"),
        (f"[[tenants]]\nname = 'a'\nsecret = '{'aa' * 32}'\n", "tenants"),
    ):
        file.write_text(secrets)
        for mode in (0o644, 0o640, 0o602):
            file.chmod(mode)
            with pytest.raises(ConfigurationError, match=f"sets '{named}', and with mode {mode:04o}") as caught:
                read_config_file(file)
            assert "aaaa" not in str(caught.value)
    assert "chmod 600" in start(tmp_path, "--config", str(file))


def test_files_that_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "tokenlake.toml"
    for mode, text in ((0o644, "cluster_secret = ''\n"), (0o600, f"cluster_secret = '{'aa' * 32}'\n")):
        file.write_text(text)
        file.chmod(mode)
        assert read_config_file(file) == text


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bom.toml"
    file.write_bytes(b'\xef\xbb\xbfnode = "b"\n')
    assert read_config_file(file) == 'node = "b"\n'


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
    words = ["--node", "x", "--memory", "1MiB", "--listen", "127.0.0.1:0", "--metrics", ""]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENLAKE_")}
    ended = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=clean | {"XDG_RUNTIME_DIR": str(runtime)},
        check=False,
    )
    assert ended.returncode == 1
    assert "(set by default, in the directory of the variable XDG_RUNTIME_DIR)" in ended.stderr


def test_a_state_directory_that_takes_no_files(tmp_path: Path) -> None:
    """Also for root, which the modes of directories do not stop."""
    assert "setting 'state_directory' is '/proc'" in start(tmp_path, "--state-directory", "/proc")
    missing = tmp_path / "none"
    message = start(tmp_path, "--state-directory", str(missing))
    assert f"setting 'state_directory' is '{missing}'; expected a directory that exists" in message
    assert not missing.exists()


def test_huge_pages_that_were_not_set_aside(tmp_path: Path) -> None:
    free = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("HugePages_Free"))
    if int(free.split()[1]):
        pytest.skip("this machine has huge pages")
    message = start(tmp_path, "--memory", "2MiB", "--huge-pages", "true")
    assert "'huge_pages'" in message
    assert "sysctl vm.nr_hugepages" in message


def test_only_loopback_is_listened_on_without_a_certificate(tmp_path: Path) -> None:
    for address in ("0.0.0.0:0", "[::]:0"):
        message = start(tmp_path, "--listen", address)
        assert "'listen'" in message
        assert "loopback" in message
        assert "'certificate'" in message


def test_addresses_in_use(tmp_path: Path, node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        for setting in ("listen", "metrics"):
            message = start(tmp_path, f"--{setting}", taken)
            assert f"'{setting}'" in message
            assert taken in message
    for more in ((), ("--listen", taken)):
        message = start(tmp_path, "--socket", str(node.socket), *more)
        assert "'socket'" in message
        assert "the daemon of this node runs already" in message
    for setting in ("listen", "metrics"):
        message = start(tmp_path, f"--{setting}", "192.0.2.1:5000", "--unencrypted-beyond-loopback", "true")
        assert f"setting '{setting}' is '192.0.2.1:5000'" in message
        assert "no interface of this machine has this one" in message
    (tmp_path / "a-file").write_text("mine")
    assert "'socket'" in start(tmp_path, "--socket", str(tmp_path / "a-file"))
    assert (tmp_path / "a-file").read_text() == "mine"
    for setting in ("socket", "control-socket"):
        message = start(tmp_path, f"--{setting}", str(tmp_path / "no" / "such" / "directory.sock"))
        assert f"'{setting.replace('-', '_')}'" in message
        assert "a path that can be created (No such file or directory)" in message


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    message = start(tmp_path, "--memory", "1TiB")
    assert "'memory' asks for 1TiB" in message
    assert "available" in message


def test_stale_sockets_and_clean_stops() -> None:
    with daemons() as cluster:
        node = cluster.nodes[0]
        node.kill()
        assert stat.S_ISSOCK(node.socket.stat().st_mode), "a killed daemon leaves its socket"
        node.start()
        cluster.wait_ready()
        assert stat.S_IMODE(node.socket.stat().st_mode) == 0o660
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, Prompt(1, 2))
            assert node.stop() == 0
            assert not node.socket.exists()
        node.start()
        cluster.wait_ready()
        assert node.process is not None
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(LIMIT_S) == 0


def test_signals_that_mean_nothing_are_told(tmp_path: Path) -> None:
    """logrotate and operators send some of them; they ended the daemon without a word."""
    with daemons() as cluster:
        node = cluster.nodes[0]
        assert node.process is not None
        for number in IGNORED:
            node.process.send_signal(number)
            wait_until(lambda: f"{number.name} has no effect" in node.log.read_text(), number.name)  # noqa: B023
        assert node.running
        assert node.stop() == 0


@pytest.mark.parametrize("command", [SERVE, [*COMMAND, "serve"]], ids=["module", "command"])
def test_a_sigterm_before_the_daemon_runs(command: list[str], tmp_path: Path) -> None:
    """Process 1 of a container gets only signals that it handles."""
    words = ["--node", "x", "--memory", "1MiB", "--socket", str(tmp_path / "x.sock"), "--listen", "127.0.0.1:0"]
    with subprocess.Popen([*command, *words, "--metrics", ""], stderr=subprocess.PIPE) as daemon:
        status = Path(f"/proc/{daemon.pid}/status")

        def handles_it() -> bool:
            caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

        wait_until(handles_it, "SIGTERM is handled")
        daemon.terminate()
        assert daemon.stderr is not None
        assert daemon.stderr.read() == b""
    assert daemon.returncode == 0


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_a_terminal_shows_that_memory_is_prepared(tmp_path: Path, ending: signal.Signals) -> None:
    """A terminal that is closed sends SIGHUP."""
    ours, theirs = pty.openpty()
    words = ["--node", "x", "--memory", "64MiB", "--socket", str(tmp_path / "x.sock"), "--listen", "127.0.0.1:0"]
    with (
        subprocess.Popen([*SERVE, *words, "--metrics", ""], stderr=theirs) as daemon,
        os.fdopen(ours, "rb", 0) as terminal,
    ):
        os.close(theirs)
        shown = b""
        while b"is ready after" not in shown:
            shown += terminal.read(1 << 16)
        daemon.send_signal(ending)
    assert daemon.returncode == 0
    assert b"preparing memory" in shown


def test_a_pipe_gets_every_value_whole(tmp_path: Path) -> None:
    path = "/" + "long/" * 40 + "ca.pem"
    shown = subprocess.run(
        [*COMMAND, "config", "show", "--ca", path, "--certificate", path, "--key", path],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"COLUMNS": "60"},
        check=False,
    )
    assert shown.stdout.count(path) == 3, shown
    assert "unencrypted_beyond_loopback" in shown.stdout
