"""Python programs that are forked from a process that has imported their modules: a daemon starts in 0.1 s of processor
time and not in 0.4.

`use` names, once per process, the module that the fork server imports with its first request; from then on
`start_module` forks. Without `use` it runs the interpreter, as benchmarks and the tests of the start itself do.

::

    this process --- control (sequenced packets: a request and the child's descriptors) ---> fork server, one thread
         ^                                                                                       | fork
         +------- status (a pair of sockets for each child): pid, then exit status -------------+--> child

The kernel kills the fork server when this process ends, and the children when the fork server ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from tokenlake_testing.children import start_child
from tokenlake_testing.exec_bound import bind_to

_REQUEST_BYTES: Final = 128 << 10
"""Limit of a request, most of which is the environment."""
_MOST_DESCRIPTORS: Final = 16
_STATUS: Final = struct.Struct("<i")
_WITHOUT_THREADS: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment of the fork server, so that numpy starts no thread: only the thread that forks exists in a child."""


class Process(Protocol):
    """What `subprocess.Popen` and `ForkedProcess` have in common."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ForkedProcess:
    """A child of the fork server. As `subprocess.Popen`; may be used by several threads."""

    def __init__(self, status: socket.socket, name: str) -> None:
        """`status`: where the fork server sends the process id and, at the end, the status. Takes it over. Raises
        RuntimeError where the fork server ended instead, as after an error in the module that it imports."""
        self._status = status
        self._name = name
        self._lock = threading.Lock()
        self.returncode: int | None = None
        """The exit status, or the negative number of the signal that ended the process; None while it runs."""
        pid = self._read()
        if pid is None:
            status.close()
            raise RuntimeError(f"the fork server ended before it started {name}; its error output says why")
        self.pid: int = pid

    def poll(self) -> int | None:
        """The exit status if the process has ended."""
        with self._lock:
            if self.returncode is None and self._ends_within(0.0):
                status = self._read()
                # The kernel kills the children of a fork server that has ended.
                self.returncode = -signal.SIGKILL if status is None else status
                self._status.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        if self.returncode is None and not self._ends_within(timeout):
            raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ends_within(self, timeout: float | None) -> bool:
        waiting = select.poll()
        try:
            waiting.register(self._status, select.POLLIN)
        except ValueError:
            # Another thread has read the status, and closed the socket.
            return True
        return bool(waiting.poll(None if timeout is None else 1000 * timeout))

    def _read(self) -> int | None:
        """The next number; None where the fork server has ended."""
        data = self._status.recv(_STATUS.size)
        return int(_STATUS.unpack(data)[0]) if data else None


class ForkServer:
    """A process that imports a module when the first program is started, and forks each program."""

    def __init__(self, module: str, run: Callable[..., Any] = start_child) -> None:
        """`module`: what the fork server imports. The import must start no threads. `run`: as `subprocess.Popen`."""
        self._module = module
        self._run = run
        self._lock = threading.Lock()
        self._process: subprocess.Popen[Any] | None = None
        self._control: socket.socket | None = None

    @property
    def control(self) -> socket.socket:
        """The socket for the requests. Processes that inherit it may use the fork server, too (`fork`)."""
        with self._lock:
            if self._control is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES)
                with theirs:
                    self._process = self._run(
                        [sys.executable, "-m", __name__, str(theirs.fileno()), self._module],
                        pass_fds=[theirs.fileno()],
                        env={**os.environ, **_WITHOUT_THREADS},
                    )
                self._control = ours
            return self._control

    def close(self) -> None:
        """End the fork server, and with it its programs. Idempotent."""
        if self._process is not None and self._control is not None:
            self._process.kill()
            self._process.wait()
            self._control.close()


def fork(
    control: socket.socket,
    module: str,
    arguments: Sequence[str],
    descriptors: Mapping[int, int],
    environment: Mapping[str, str],
    *,
    new_session: bool = False,
) -> ForkedProcess:
    """Run `python -m module arguments` in a child of the fork server that has this `control`. `descriptors`: those of
    this process that the program has, by their number there; beside these it has the standard ones of the fork
    server."""
    request = {
        "module": module,
        "arguments": list(arguments),
        "numbers": list(descriptors),
        "environment": dict(environment),
        "directory": os.getcwd(),
        "new_session": new_session,
    }
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        socket.send_fds(control, [json.dumps(request).encode()], [theirs.fileno(), *descriptors.values()])
    return ForkedProcess(ours, module)


_server: ForkServer | None = None


def use(module: str) -> None:
    """From now on `start_module` forks from a process that has imported `module`."""
    global _server
    _server = ForkServer(module)


@contextlib.contextmanager
def executed() -> Iterator[None]:
    """Within it, `start_module` runs the interpreter."""
    global _server
    server, _server = _server, None
    try:
        yield
    finally:
        _server = server


def start_module(
    module: str,
    arguments: Sequence[str],
    descriptors: Mapping[int, int],
    environment: Mapping[str, str] | None = None,
    *,
    new_session: bool = False,
) -> Process:
    """Run `python -m module arguments` in a process that does not outlive this one. `descriptors`: this process's, by
    the number that they have there (0, 1 or 2). `environment`: of the program; None for that of this process."""
    if _server is not None:
        given = os.environ if environment is None else environment
        return fork(_server.control, module, arguments, descriptors, given, new_session=new_session)
    named = {("stdin", "stdout", "stderr")[number]: own for number, own in descriptors.items()}
    process: subprocess.Popen[bytes] = start_child(
        [sys.executable, "-m", module, *arguments], env=environment, start_new_session=new_session, **named
    )
    return process


def main(descriptor: int, module: str) -> None:
    """The main function of the fork server: serve the requests that come over the socket `descriptor`, until all of its
    other ends are closed. In a child it returns after the program."""
    _serve(socket.socket(fileno=descriptor), module)()


def _warm_up(module: str) -> None:
    importlib.import_module(module)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"the import of {module} starts threads, which a forked program would not have")
    # The collector would write to all objects, and so copy their pages, in each child.
    gc.collect()
    gc.freeze()


def _serve(control: socket.socket, module: str) -> Callable[[], object]:
    """Fork a child for each request. Returns the program that a child runs; in the fork server, at its end, nothing."""
    children: dict[int, socket.socket] = {}
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(1 << 12)
            _reap(children)
        if control not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, _REQUEST_BYTES, _MOST_DESCRIPTORS)
        if not data:
            return lambda: None
        if module not in sys.modules:
            _warm_up(module)
        status = socket.socket(fileno=descriptors.pop(0))
        server, child = os.getpid(), os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for sock in (control, woken, wakes, status, *children.values()):
                sock.close()
            return _program(json.loads(data), descriptors, server)
        children[child] = status
        for given in descriptors:
            os.close(given)
        _tell(status, child)


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child == 0:
            return
        with children.pop(child) as sock:
            _tell(sock, os.waitstatus_to_exitcode(status))


def _tell(sock: socket.socket, number: int) -> None:
    # The process that asked may have ended.
    with contextlib.suppress(OSError):
        sock.send(_STATUS.pack(number), socket.MSG_NOSIGNAL)


def _program(request: dict[str, Any], descriptors: Sequence[int], server: int) -> Callable[[], object]:
    """Make this process, a child of `server`, what the request asks for."""
    bind_to(server)
    if request["new_session"]:
        os.setsid()
    numbers = request["numbers"]
    # A descriptor may have come with the number that another one has to get.
    copies = [fcntl.fcntl(own, fcntl.F_DUPFD, 1 + max(2, *numbers)) for own in descriptors]
    for own in descriptors:
        os.close(own)
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number)
        os.close(copy)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["", *request["arguments"]]
    return lambda: runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
