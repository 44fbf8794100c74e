"""The place of one engine in a soak: its process is started again after a kill, and the counts of all its processes are
summed up."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Final

from tokenlake.errors import Unreachable
from tokenlake_bench.soak.load import GROUPS
from tokenlake_bench.worker import Worker

SLICE_S: Final = 1.0
"""Seconds of work between two reports of an engine process; a killed process loses its counts since its last report."""
END_S: Final = 120.0


class EngineSlot(threading.Thread):
    """A thread that runs the processes of one engine one after the other, until `leave`. `groups`: tenants and layouts
    of these processes, in rotation."""

    def __init__(
        self, name: str, socket: Path, groups: tuple[int, ...], seed: int, rate: float, wrong_file: Path
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.done: Counter[str] = Counter()
        self.lives = 0
        self.ended_by_themselves: list[str] = []
        """Reasons for which processes ended without being killed."""
        self.drained = threading.Event()
        self._socket = socket
        self._groups = groups
        self._seed = seed
        self._rate = rate
        self._wrong_file = wrong_file
        self._worker: Worker | None = None
        self._lock = threading.Lock()
        self._killed = False
        self._may_start = threading.Event()
        self._may_start.set()
        self._ending = threading.Event()
        self._leaving = threading.Event()

    @property
    def pid(self) -> int | None:
        """Id of the present process; None while there is none."""
        with self._lock:
            return None if self._worker is None else self._worker.pid

    def kill(self) -> None:
        """Kill the process (kill -9); the next one starts after `revive`."""
        self._may_start.clear()
        with self._lock:
            self._killed = self._worker is not None
            self._send(signal.SIGKILL)

    def revive(self) -> None:
        """Start the next process, after `kill`."""
        self._may_start.set()

    def freeze(self) -> None:
        """Stop the process with SIGSTOP."""
        with self._lock:
            self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process with SIGCONT."""
        with self._lock:
            self._send(signal.SIGCONT)

    def drain(self) -> None:
        """End the load. The process goes on, and the event `drained` is set when it has given back all leases and
        writes."""
        self._ending.set()
        self._may_start.set()

    def leave(self) -> None:
        """End the engine's process and the thread."""
        self.drain()
        self._leaving.set()
        self.thaw()
        self.join(END_S)

    def run(self) -> None:
        """The main function of the thread: start processes and collect their reports, until `leave`."""
        while not self.drained.is_set():
            self._may_start.wait()
            if self._ending.is_set() and self.lives:
                # The process was killed and not started again before the load ended, so it has no leases or writes to
                # give back.
                self.drained.set()
                return
            worker = self._start()
            try:
                while not self._ending.is_set():
                    self.done.update(worker.call("work", seconds=SLICE_S))
                self.done.update(worker.call("drain"))
                self.drained.set()
                self._leaving.wait()
            except Unreachable as error:
                with self._lock:
                    if not self._killed:
                        self.ended_by_themselves.append(f"{self.name}: {error}")
                # This wait bounds the rate at which a process that fails repeatedly is started again.
                self._leaving.wait(SLICE_S)
            finally:
                with self._lock:
                    self._worker = None
                worker.close()

    def _start(self) -> Worker:
        group = self._groups[self.lives % len(self._groups)]
        name = f"{self.name}.{self.lives}"
        words = (str(self._socket), GROUPS[group].credential, str(group), str(self._seed), name)
        worker = Worker("tokenlake_bench.soak.engine", *words, str(self._rate), str(self._wrong_file))
        with self._lock:
            self.lives += 1
            self._killed = False
            self._worker = worker
        return worker

    def _send(self, number: signal.Signals) -> None:
        # `_worker` is cleared before the process is reaped, because another process can have the same id from then on.
        if self._worker is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._worker.pid, number)
