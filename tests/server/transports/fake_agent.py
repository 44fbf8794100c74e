"""Stands for NIXL: agents of one process that read by copying, and can hang, be slow, fail, and write late."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from tokenlake_server.nixl.agent import NotStarted, Span, State


class _Read:
    def __init__(self, agent: str, here: Sequence[Span], there: Sequence[Span]) -> None:
        self.agent = agent
        self.left = list(zip(here, there, strict=True))
        self.done = False


class Fabric:
    """What connects the agents. `mode`: reads are `sound`, `slow` (one span per look), `hang` after the first span, or
    `fail`."""

    def __init__(self) -> None:
        self.mode = "sound"
        self.agents: dict[str, FakeAgent] = {}
        self.released_early = 0
        """Reads that were released although they were not done: NIXL would let them write into free memory."""
        self.refusals = 0
        """Registrations of memory that fail from now on."""
        self.unreachable = 0
        """Attempts to meet an agent that fail from now on."""
        self.broken = 0
        """Calls of `progress` that fail from now on, as no call should."""
        self.lock = threading.Lock()

    def make(self, name: str) -> FakeAgent:
        """For `Nixl(make=...)`."""
        assert name not in self.agents, "a name has one life"
        self.agents[name] = made = FakeAgent(self, name)
        return made

    def wake(self) -> int:
        """The late bytes come, of all agents that have not ended. Returns how many there are."""
        with self.lock:
            return sum(agent.write_late() for agent in self.agents.values())


class FakeAgent:
    """As `Agent`."""

    def __init__(self, fabric: Fabric, name: str) -> None:
        self.name = name
        self._fabric = fabric
        self._memory: set[Span] = set()
        self._registrations = 0
        self.known: dict[str, bytes] = {}
        """The descriptions of the agents that it knows, by name."""
        self._reads: dict[int, _Read] = {}
        self.ended = False

    def register(self, memory: Span) -> None:
        if self._fabric.refusals:
            self._fabric.refusals -= 1
            raise OSError("no memory can be registered")
        assert memory not in self._memory
        self._memory.add(memory)
        self._registrations += 1

    def deregister(self, memory: Span) -> None:
        self._memory.remove(memory)

    def description(self) -> bytes:
        return f"{self.name}@{self._registrations}".encode()

    def meet(self, description: bytes) -> str:
        name, _, _ = description.decode().partition("@")
        self._fabric.unreachable -= 1
        if self._fabric.agents[name].ended or self._fabric.unreachable >= 0:
            raise OSError("the agent cannot be reached")
        if self.known.get(name, description) != description:
            raise OSError("it is known already with another description")
        self.known[name] = description
        return name

    def forget(self, agent: str) -> None:
        self.known.pop(agent, None)

    def read(self, agent: str, here: Sequence[Span], there: Sequence[Span]) -> int:
        if agent not in self.known:
            raise NotStarted(f"{agent} is not known")
        for span in here:
            assert self._covers(span), "into memory that is not registered"
        if not all(self._fabric.agents[agent]._covers(span) for span in there):
            raise NotStarted("memory that is not registered")
        number = max(self._reads, default=0) + 1
        self._reads[number] = _Read(agent, here, there)
        return number

    def state(self, read: int) -> State:
        made = self._reads[read]
        if self._fabric.mode == "fail" or made.agent not in self.known or self._fabric.agents[made.agent].ended:
            return State.FAILED
        with self._fabric.lock:
            if self._fabric.mode == "hang":
                spans = 1 if len(made.left) > 1 and not made.done else 0
            else:
                spans = len(made.left) if self._fabric.mode == "sound" else 1
            for _ in range(spans):
                _copy(*made.left.pop(0))
            made.done = not made.left or self._fabric.mode == "hang"
        return State.UNDER_WAY if made.left else State.DONE

    def release(self, read: int) -> None:
        self._fabric.released_early += bool(self._reads.pop(read).left)

    def progress(self) -> None:
        if self._fabric.broken:
            self._fabric.broken -= 1
            raise RuntimeError("a defect")

    def end(self) -> None:
        with self._fabric.lock:
            self.ended = True
            self._reads.clear()

    @property
    def reading(self) -> bool:
        """True if a read hangs."""
        return any(read.done and read.left for read in list(self._reads.values()))

    def write_late(self) -> int:
        """Write what its reads have left. Returns the number of bytes."""
        nbytes = 0
        for read in self._reads.values():
            for pair in read.left:
                nbytes += pair[0][1]
                _copy(*pair)
        return nbytes

    def _covers(self, span: Span) -> bool:
        address, length, device = span
        return any(
            start <= address and address + length <= start + nbytes and device == at
            for start, nbytes, at in self._memory
        )


def _copy(here: Span, there: Span) -> None:
    ctypes.memmove(here[0], there[0], here[1])
