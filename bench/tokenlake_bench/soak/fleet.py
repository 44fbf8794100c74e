"""The daemons and engine processes of a soak, the faults that they suffer, and the samples taken of them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tokenlake_bench.soak.faults import Fault, FaultKind, Target
from tokenlake_bench.soak.gauges import HELD, Recorder, entries, held, process_gauges, total
from tokenlake_bench.soak.load import GROUPS
from tokenlake_bench.soak.slot import EngineSlot
from tokenlake_testing.cluster import Cluster, Node

ENGINES: Final = 3
"""Number of engines per node."""
SLOT_GROUPS: Final = ((0,), (0, 1), (2, 3))
"""By number of the engine at its node: the groups (tenant and layout) of its processes. An engine that is killed and
started again takes the next group in rotation. The first engine of each node is never killed."""
MEMORY: Final = "8MiB"
REGION: Final = "1MiB"
LEASE_S: Final = "2"
RESERVATION_S: Final = "5"
"""Seconds that a reservation lasts. Like `LEASE_S` it is so short that many deadlines are missed."""
EVICTED: Final = "tokenlake_evicted_segments_total"

_TRACEBACK: Final = "Traceback (most recent call last)"

_TENANTS = """
cluster_secret = "{secret}"
allow_uids = [{uid}]

[[tenants]]
name = "red"
secret = "{red}"
tokens = ["{red_token}"]

[[tenants]]
name = "blue"
secret = "{blue}"
tokens = ["{blue_token}"]
"""


class Fleet:
    """The daemons and engine processes of a soak. A context manager: starts all processes, and ends them at the
    exit."""

    def __init__(self, nodes: int, seed: int, rate: float, directory: Path) -> None:
        config = directory / "tokenlake.toml"
        config.touch(mode=0o600)
        tokens = {f"{group.tenant}_token": group.credential for group in GROUPS}
        config.write_text(_TENANTS.format(uid=os.getuid(), secret="cc" * 32, red="aa" * 32, blue="bb" * 32, **tokens))
        self.wrong_file = directory / "wrong.jsonl"
        self.recorder = Recorder()
        self.faults: Counter[str] = Counter()
        """Number of faults so far, by kind of fault and of process."""
        self._ended: list[str] = []
        self.counters: Counter[str] = Counter()
        """Counters of the daemons, summed over all processes that each node had, each as of the last sample of that
        process."""
        rules = {"lease_s": LEASE_S, "reservation_s": RESERVATION_S}
        self.cluster = Cluster(nodes, MEMORY, REGION, config=str(config), **rules)
        self.engines = {
            (slot := f"engine {number}.{place}"): EngineSlot(
                slot, node.socket, SLOT_GROUPS[place], seed, rate, self.wrong_file
            )
            for number, node in enumerate(self.cluster.nodes)
            for place in range(ENGINES)
        }
        self.nodes = {node.name: node for node in self.cluster.nodes}
        self._stopped: set[str] = set()
        self._down: set[str] = set()
        self._last: dict[str, Counter[str]] = {}

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        for engine in self.engines.values():
            engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for engine in self.engines.values():
            # All engines are told to give back their leases at the same time, because each takes a moment.
            engine.drain()
        for engine in self.engines.values():
            engine.leave()
        self.cluster.close()

    def targets(self) -> list[Target]:
        """The first daemon and the first engine of each node are never killed (not mortal)."""
        nodes = [Target(name, number > 0) for number, name in enumerate(self.nodes)]
        return nodes + [Target(name, not name.endswith(".0")) for name in self.engines]

    def begin(self, fault: Fault) -> None:
        """Apply a fault: kill or stop its process."""
        target: Node | EngineSlot = self.nodes.get(fault.target) or self.engines[fault.target]
        if isinstance(target, Node) and not target.running:
            return
        process_kind = "daemon" if isinstance(target, Node) else "engine"
        self.faults[f"{fault.kind} {process_kind}"] += 1
        if fault.kind is FaultKind.KILL:
            self._down.add(fault.target)
            self._forget(fault.target)
            target.kill()
        else:
            self._stopped.add(fault.target)
            target.freeze()

    def end(self, fault: Fault) -> None:
        """End a fault: start its process again, or continue it."""
        target: Node | EngineSlot = self.nodes.get(fault.target) or self.engines[fault.target]
        if fault.target in self._stopped:
            self._stopped.discard(fault.target)
            target.thaw()
        elif fault.target in self._down:
            self._down.discard(fault.target)
            target.start() if isinstance(target, Node) else target.revive()

    def tend(self) -> None:
        """Start daemons again that ended without being killed, and record the end of their log."""
        for name, node in self.nodes.items():
            if name not in self._down and not node.running:
                self._ended.append(f"{name}: {node.log.read_text()[-500:]}")
                self._forget(name)
                node.start()

    def sample(self, at_s: float) -> None:
        """Take a sample of the gauges of every process that runs and is not stopped (SIGSTOP)."""
        for name, node in self.nodes.items():
            if name in self._stopped or not node.running:
                continue
            with contextlib.suppress(OSError):
                metrics = node.metrics()
                assert node.process is not None
                values = process_gauges(node.process.pid)
                values |= held(metrics) | {"entries": entries(metrics)}
                self.recorder.add(at_s, name, node.process.pid, values)
                self._last[name] = Counter({key: int(value) for key, value in metrics.items() if "{" not in key})
        for name, engine in self.engines.items():
            pid = engine.pid
            if pid is not None and name not in self._stopped:
                with contextlib.suppress(OSError):
                    self.recorder.add(at_s, name, pid, process_gauges(pid))

    def counted(self, metric: str) -> int:
        """Value of a counter, summed over all processes of all daemons, as of the last samples."""
        return self.counters[metric] + sum(last[metric] for last in self._last.values())

    def done(self) -> Counter[str]:
        """Number of actions of all engines, by name of the action."""
        return sum((engine.done for engine in self.engines.values()), Counter())

    def ended(self) -> list[str]:
        """Processes that ended although no fault killed them, with the reason."""
        return [*self._ended, *(line for engine in self.engines.values() for line in engine.ended_by_themselves)]

    def failures(self) -> list[str]:
        """Errors that daemons caught and logged: the end of each traceback in their logs."""
        found: list[str] = []
        for name, log in self.logs().items():
            found += (f"{name}: {_end(text)}" for text in log.split(_TRACEBACK)[1:])
        return found

    def logs(self) -> dict[str, str]:
        """Logs of the daemons over the whole run."""
        return {name: node.log.read_text(errors="replace") for name, node in self.nodes.items() if node.log.exists()}

    def drain(self, limit_s: float) -> bool:
        """Tell all engines to end their load. Returns False when one did not give back all leases and writes within
        `limit_s`."""
        for engine in self.engines.values():
            engine.drain()
        until = time.monotonic() + limit_s
        return all(engine.drained.wait(max(0.0, until - time.monotonic())) for engine in self.engines.values())

    def recover(self) -> None:
        """End the faults under way, and wait until all daemons serve. Raises Unreachable when one does not."""
        for name in sorted(self._stopped):
            (self.nodes.get(name) or self.engines[name]).thaw()
        for name in sorted(self._down):
            node = self.nodes.get(name)
            node.start() if node is not None else self.engines[name].revive()
        self._stopped.clear()
        self._down.clear()
        self.cluster.wait_ready()

    def leave(self) -> None:
        """End the processes of all engines."""
        for engine in self.engines.values():
            engine.leave()

    def stop_others(self) -> None:
        """End all daemons but the first one."""
        for node in self.cluster.nodes[1:]:
            node.stop()

    def slots_missing(self) -> float:
        """Number of slots over all nodes that are neither free nor taken by a segment; without a leak it is 0."""
        totals = self.cluster.totals()
        names = ("tokenlake_slots", "tokenlake_free_slots", "tokenlake_segments")
        slots, free, segments = (total(totals, name) for name in names)
        return slots - free - segments

    def wrong(self) -> tuple[int, int]:
        """(number of segments, number of bytes) that engines read and that differed from the expected bytes."""
        if not self.wrong_file.exists():
            return 0, 0
        lines = [json.loads(line) for line in self.wrong_file.read_text().splitlines()]
        return sum(line["segments"] for line in lines), sum(line["bytes"] for line in lines)

    def held(self) -> dict[str, float]:
        """Number of pinned and quarantined slots over all nodes, by kind."""
        pages = [held(node.metrics()) for node in self.nodes.values()]
        return {name: sum(page[name] for page in pages) for name in HELD}

    def _forget(self, name: str) -> None:
        self.counters.update(self._last.pop(name, Counter()))


def _end(traceback: str) -> str:
    """The last call and the error in the text of a traceback."""
    lines = [line for line in traceback.splitlines()[1:] if line.strip()]
    size = next((at for at, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
    return " ".join(line.strip() for line in lines[max(0, size - 2) : size + 1])


assert all(group < len(GROUPS) for groups in SLOT_GROUPS for group in groups)
