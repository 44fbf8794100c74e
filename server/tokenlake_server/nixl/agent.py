"""One life of a NIXL agent: the only module that touches NIXL. No method is called by two threads at a time.

Descriptors are tuples, and the description for other nodes has the agent's own encoding, in bytes: neither pickle nor
NIXL's etcd nor its listener is used. NIXL's package sets the logging of the process up when it is imported, so that its
extension module is loaded by its path, without the package.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.util
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenlake.wire.places import HOST

PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""The packages with the extension module, by the GPUs that each supports; any of them reads the memory of machines."""
ENVIRONMENT = {
    # A read that UCX emulates with messages is answered by the other process. That process is ended by UCX when the
    # reader's agent is gone before the answer (ucp_request.inl, "unexpected error"); and TCP of our own is faster.
    "UCX_PROTO_EMULATION_ENABLE": "n",
    # UCX writes its warnings to the standard output otherwise, among them one for each read that an agent leaves.
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "error",
}
"""Settings of UCX, where the environment has none."""

Span = tuple[int, int, int]
"""Address, length, device (`HOST`, or the number of a GPU)."""


class State(enum.Enum):
    """The state of a read."""

    DONE = "all bytes are there"
    UNDER_WAY = "bytes may still come"
    FAILED = "it has failed; NIXL does not tell whether bytes may still come"


class NotStarted(OSError):
    """A read could not be started: nothing of it is under way."""


_loading = threading.Lock()


def library() -> Any | None:
    """The extension module of NIXL, loaded with the first call; None where it is not installed."""
    with _loading:
        for package in PACKAGES:
            found = importlib.util.find_spec(package)
            for folder in (found.submodule_search_locations or ()) if found is not None else ():
                for path in sorted(Path(folder).glob("_bindings*.so")):
                    return sys.modules.get(f"{package}._bindings") or _load(f"{package}._bindings", path)
        return None


def _load(name: str, path: Path) -> Any:
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    # A library of NIXL's packages (libnl-route) crashes in its destructor at the exit of the process, so the process
    # ends before the destructors of libraries: Python has ended by then, with this exit status.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    return module


class Agent:
    """An agent with the UCX backend. It reads the memory of other agents, and lets them read the memory that is
    registered. A read that is under way can be neither stopped nor released: its bytes may come until the agent is
    gone."""

    def __init__(self, name: str) -> None:
        """`name` differs from the names of all other agents, and of earlier agents of this node. Raises OSError."""
        self.name = name
        nixl = library()
        if nixl is None:
            raise OSError("NIXL is not installed")
        self._nixl: Any = nixl
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = False
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        try:
            self._agent = self._nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend("UCX", {})]
        except Exception as error:
            raise OSError(f"NIXL has no agent with the UCX backend: {error}") from error

    def register(self, memory: Span) -> None:
        """Let the agent read into this memory, and others read from it. Raises OSError."""
        try:
            self._agent.registerMem(self._registration(memory), self._backends)
        except Exception as error:
            raise OSError(f"NIXL did not register {memory[1]} bytes of memory: {error}") from error

    def deregister(self, memory: Span) -> None:
        """Undo `register`. Raises OSError."""
        try:
            self._agent.deregisterMem(self._registration(memory), self._backends)
        except Exception as error:
            raise OSError(f"NIXL did not let {memory[1]} bytes of memory go: {error}") from error

    def description(self) -> bytes:
        """The description by which other agents can read the memory that is registered now."""
        return bytes(self._agent.getLocalMD())

    def meet(self, description: bytes) -> str:
        """Learn of another agent, and return its name. Raises OSError if it cannot be reached, or is known already with
        another description."""
        try:
            name = self._agent.loadRemoteMD(description)
        except Exception as error:
            raise OSError(f"the agent cannot be reached: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, agent: str) -> None:
        """Forget another agent. Reads from it that are under way have failed."""
        try:
            self._agent.invalidateRemoteMD(agent)
        except Exception:
            # NIXL forgets an agent by itself when its process has ended.
            return

    def read(self, agent: str, here: Sequence[Span], there: Sequence[Span]) -> int:
        """Start to read from spans of another agent into spans of this one, and return the number of the read. Raises
        `NotStarted`; and another OSError where it is not known whether bytes come."""
        nixl = self._nixl
        try:
            handle: int = self._agent.createXferReq(
                nixl.NIXL_READ, self._spans(here), self._spans(there), agent, "", self._backends
            )
        except Exception as error:
            raise NotStarted(f"NIXL does not read from {agent}: {error}") from error
        try:
            self._agent.postXferReq(handle)
        except Exception as error:
            reason = f"NIXL did not read from {agent}: {error}"
            # The spans before the one that failed may be under way.
            raise (NotStarted(reason) if len(here) == 1 else OSError(reason)) from error
        return handle

    def state(self, read: int) -> State:
        """The state of a read. Makes progress with all reads, for as long as there is some."""
        try:
            status = self._agent.getXferStatus(read)
        except Exception:
            return State.FAILED
        if status == self._nixl.NIXL_SUCCESS:
            return State.DONE
        return State.UNDER_WAY if status == self._nixl.NIXL_IN_PROG else State.FAILED

    def release(self, read: int) -> None:
        """Free what NIXL keeps of a read that is DONE."""
        self._agent.releaseXferReq(read)

    def progress(self) -> None:
        """Make progress with the reads of this agent, and let others connect to it."""
        self._agent.getNotifs({})

    def end(self) -> None:
        """End the agent. No read that was under way writes any more."""
        # The destructor runs here: nothing else refers to the agent.
        del self._agent, self._backends

    def _spans(self, spans: Sequence[Span]) -> Any:
        return self._nixl.nixlXferDList(
            self._kind(spans[0]), [(address, length, max(0, device)) for address, length, device in spans]
        )

    def _registration(self, memory: Span) -> Any:
        address, length, device = memory
        return self._nixl.nixlRegDList(self._kind(memory), [(address, length, max(0, device), "")])

    def _kind(self, memory: Span) -> Any:
        return self._nixl.DRAM_SEG if memory[2] == HOST else self._nixl.VRAM_SEG
