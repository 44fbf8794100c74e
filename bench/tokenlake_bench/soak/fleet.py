"""The daemons and engine processes of a soak, the faults that they suffer, and the samples taken of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tokenlake.errors import Unreachable
from tokenlake.hints import Hints
from tokenlake.wire import Code
from tokenlake_bench.live_client import LiveClient
from tokenlake_bench.soak.faults import Fault, FaultKind, Target
from tokenlake_bench.soak.gauges import entries, held, process_gauges, total
from tokenlake_bench.soak.load import GROUPS, PROMPTS, Group, Tokens, fresh_prompt, prompt
from tokenlake_client import Pool
from tokenlake_testing.children import start_child
from tokenlake_testing.cluster import Cluster, Node

ENGINES: Final = 3
"""Number of engines per node."""
ROTATIONS: Final = ((0,), (0, 1), (2, 3))
"""By number of the engine at its node: the groups (tenant and layout) of its processes. An engine that is killed and
started again takes the next group in rotation. The first engine of each node is never killed."""
MEMORY: Final = "8MiB"
REGION: Final = "1MiB"
LEASE_S: Final = "2"
RESERVATION_S: Final = "5"
"""Seconds that a reservation lasts. Like `LEASE_S` it is so short that many deadlines are missed."""
END_S: Final = 120.0
SEGMENTS: Final = 2
"""Segments of each prompt that `displace` stores: no more than a node may keep as cached copies."""
DISPLACE_S: Final = 15.0
"""Seconds within which one of them must be stored and read back. A store is delayed while the bound on segments being
written is reached, or while a region changes its tenant."""

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


class EngineProcess:
    """One engine of a soak: a process at a time, which is killed, stopped and started again as a `Node` is."""

    def __init__(self, name: str, socket: Path, groups: tuple[int, ...], seed: int, rate: float) -> None:
        """Its files are beside the `socket` of its daemon."""
        self.name = name
        self.log = socket.parent / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._socket = socket
        self._groups = groups
        self._seed = seed
        self._rate = rate
        self._lives = 0

    def start(self) -> None:
        """Start a process of the next group."""
        group, life = self._groups[self._lives % len(self._groups)], f"{self.name}.{self._lives}"
        self._lives += 1
        self._record = self.log.with_name(f"{life}.jsonl")
        words = [str(self._socket), GROUPS[group].credential, str(group), str(self._seed), life, str(self._rate)]
        command = [sys.executable, "-m", "tokenlake_bench.soak.engine", *words, str(self._record)]
        with self.log.open("ab") as log:
            self.process = start_child(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def records(self) -> Iterator[dict[str, Any]]:
        """What all processes of this engine have recorded."""
        for path in self.log.parent.glob(f"{self.name}.*.jsonl"):
            # A process may have been killed in the middle of its last line.
            yield from (json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n"))

    @property
    def running(self) -> bool:
        """True if the process was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    @property
    def drained(self) -> bool:
        """True once the process has given back all leases and writes, or has ended."""
        return not self.running or (self._record.exists() and '"drained": true' in self._record.read_text())

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def freeze(self) -> None:
        """Stop the process with SIGSTOP."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the process with SIGCONT."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)

    def drain(self) -> None:
        """Let the process end its load; it stays connected."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self.process.stdin.write(b"\n")
                self.process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        if self.process is not None and self.process.stdin is not None:
            self.thaw()
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:
                self.kill()


class Fleet:
    """The daemons and engine processes of a soak. A context manager: starts all processes, and ends them at the
    exit."""

    def __init__(self, nodes: int, seed: int, rate: float) -> None:
        rules = {"lease_s": LEASE_S, "reservation_s": RESERVATION_S}
        self.cluster = Cluster(nodes, MEMORY, REGION, **rules)
        config = self.cluster.directory / "tokenlake.toml"
        config.touch(mode=0o600)
        tokens = {f"{group.tenant}_token": group.credential for group in GROUPS}
        config.write_text(_TENANTS.format(uid=os.getuid(), secret="cc" * 32, red="aa" * 32, blue="bb" * 32, **tokens))
        for node in self.cluster.nodes:
            node.settings["config"] = str(config)
        self.engines = [
            EngineProcess(f"engine {number}.{place}", node.socket, ROTATIONS[place], seed, rate)
            for number, node in enumerate(self.cluster.nodes)
            for place in range(ENGINES)
        ]
        members: list[Node | EngineProcess] = [*self.cluster.nodes, *self.engines]
        self.members = {each.name: each for each in members}
        self.samples: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        """By name of each process that is never killed, by gauge: pairs of (seconds, value)."""
        self.faults: Counter[str] = Counter()
        """Number of faults so far, by kind of fault and of process."""
        self.ended: list[str] = []
        """Processes that ended although no fault killed them, with the end of their log."""
        self._seed = seed
        self._stopped: set[str] = set()
        self._down: set[str] = set()

    def __enter__(self) -> Fleet:
        self.cluster.__enter__()
        for engine in self.engines:
            engine.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()
        self.cluster.close()

    def wait_started(self) -> None:
        """Wait until all engines work. Raises Unreachable."""
        if not _wait(lambda: all(any(engine.records()) for engine in self.engines), END_S):
            raise Unreachable("the engines do not start")

    def targets(self) -> list[Target]:
        """The first daemon and the first engine of each node are never killed (not mortal)."""
        nodes = [Target(node.name, number > 0) for number, node in enumerate(self.cluster.nodes)]
        return nodes + [Target(engine.name, not engine.name.endswith(".0")) for engine in self.engines]

    def survivors(self) -> list[str]:
        """Names of the processes that are never killed."""
        return [target.name for target in self.targets() if not target.mortal]

    # -- faults

    def begin(self, fault: Fault) -> None:
        """Apply a fault: kill or stop its process."""
        target = self.members[fault.target]
        if not target.running:
            return
        self.faults[f"{fault.kind} {'daemon' if isinstance(target, Node) else 'engine'}"] += 1
        if fault.kind is FaultKind.KILL:
            self._down.add(fault.target)
            target.kill()
        else:
            self._stopped.add(fault.target)
            target.freeze()

    def end(self, fault: Fault) -> None:
        """End a fault: start its process again, or continue it."""
        self._end(fault.target)

    def _end(self, name: str) -> None:
        if name in self._stopped:
            self.members[name].thaw()
        elif name in self._down:
            self.members[name].start()
        self._stopped.discard(name)
        self._down.discard(name)

    def tend(self) -> None:
        """Start processes again that ended without being killed, and record the end of their log."""
        for name, member in self.members.items():
            if name not in self._down and not member.running:
                self.ended.append(f"{name}: {member.log.read_text(errors='replace')[-500:]}")
                member.start()

    def recover(self) -> None:
        """End the faults under way, and wait until all daemons serve. Raises Unreachable when one does not."""
        for name in sorted(self._stopped | self._down):
            self._end(name)
        self.cluster.wait_ready()

    # -- what the processes do

    def sample(self, at_s: float) -> None:
        """Take a sample of the gauges of every process that is never killed and not stopped now."""
        for name in (
            target.name for target in self.targets() if not target.mortal and target.name not in self._stopped
        ):
            member = self.members[name]
            with contextlib.suppress(OSError):
                assert member.process is not None
                values = process_gauges(member.process.pid)
                if isinstance(member, Node):
                    values["entries"] = entries(member.metrics())
                for gauge, value in values.items():
                    self.samples[name][gauge].append((at_s, value))

    def done(self) -> Counter[str]:
        """Number of actions of all engines, by name of the action, and of wrong segments and bytes."""
        done: Counter[str] = Counter()
        for record in (record for engine in self.engines for record in engine.records()):
            if "wrong" in record:
                done.update({"wrong segments": record["segments"], "wrong bytes": record["bytes"]})
            else:
                done.update(record["counts"])
        return done

    def failures(self) -> list[str]:
        """Errors that daemons caught and logged: the end of each traceback in their logs."""
        logs = [(node.name, node.log.read_text(errors="replace")) for node in self.cluster.nodes if node.log.exists()]
        return [f"{name}: {_end(text)}" for name, log in logs for text in log.split(_TRACEBACK)[1:]]

    # -- after the load

    def drain(self, limit_s: float) -> bool:
        """Tell all engines to end their load. Returns False when one did not give back all leases and writes within
        `limit_s`."""
        for engine in self.engines:
            engine.drain()
        return _wait(lambda: all(engine.drained for engine in self.engines), limit_s)

    def leave(self) -> None:
        """End the processes of all engines, which are told at the same time, because each takes a moment."""
        for engine in self.engines:
            engine.thaw()
            engine.drain()
        for engine in self.engines:
            engine.close()

    def held(self) -> float:
        """Number of quarantined slots and of entries that pin segments, over all nodes."""
        return sum(held(node.metrics()) for node in self.cluster.nodes)

    def slots_missing(self) -> float:
        """Number of slots over all nodes that are neither free nor taken by a segment; without a leak it is 0."""
        totals = self.cluster.totals()
        names = ("tokenlake_slots", "tokenlake_free_slots", "tokenlake_segments")
        slots, free, segments = (total(totals, name) for name in names)
        return slots - free - segments

    def displace(self) -> tuple[int, int]:
        """(number of segments that were to be stored and were not, number of earlier segments that are left) after the
        first daemon stored as many segments as it has slots. It ran as long as the soak; the other daemons end first,
        so that it owns all segments. The earlier ones get a low priority, because the eviction policy would otherwise
        keep the valuable ones of them; one that is left is pinned forever. Raises TokenLakeError when the daemon does
        not answer."""
        node = self.cluster.nodes[0]
        for other in self.cluster.nodes[1:]:
            other.stop()
        refused = stayed = 0
        for group in GROUPS:
            with Pool.connect(node.socket, group.layout, group.credential) as pool:
                earlier = [pool.prefix(prompt(self._seed, number)).keys for number in range(PROMPTS)]
                for keys in earlier:
                    pool.hint(keys, Hints(priority=-1))
                client, stored = LiveClient(pool, self._seed, window=1), 0
                # While the segments are stored the tenant may get one region more, and then has more slots than before.
                while stored < (slots := _slots(node, group)) and not refused:
                    for number in range(stored, slots, SEGMENTS):
                        refused += SEGMENTS - _store(client, fresh_prompt(self._seed, number, SEGMENTS))
                        if refused:
                            break
                    stored = slots
                left = set()
                for keys in earlier:
                    with pool.match(keys, deadline_s=1.0) as lease:
                        left |= {key for key, code in zip(keys, lease.codes, strict=True) if code == Code.LOCAL}
                stayed += len(left)
        return refused, stayed


def _wait(holds: Callable[[], bool], limit_s: float) -> bool:
    """Wait until `holds` returns True; returns False where that takes longer than `limit_s`."""
    until = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def _store(client: LiveClient, tokens: Tokens) -> int:
    """Serve a prompt repeatedly, as an engine does, until all of it was read back. Returns the number of segments that
    were, at the deadline."""
    until = time.monotonic() + DISPLACE_S
    while (served := client.serve(tokens)).hits < SEGMENTS and time.monotonic() < until:
        pass
    return served.hits if not served.wrong_bytes else 0


def _slots(node: Node, group: Group) -> int:
    labels = (f'tenant="{group.tenant}"', f'slot_bytes="{group.layout.segment_bytes}"')
    metrics = node.metrics()
    return sum(
        int(value)
        for name, value in metrics.items()
        if name.startswith("tokenlake_slots{") and all(label in name for label in labels)
    )


def _end(traceback: str) -> str:
    """The last call and the error in the text of a traceback."""
    lines = [line for line in traceback.splitlines()[1:] if line.strip()]
    size = next((at for at, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
    return " ".join(line.strip() for line in lines[max(0, size - 2) : size + 1])
