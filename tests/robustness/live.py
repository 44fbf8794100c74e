"""Shared by the tests with real daemons: bytes that can be checked, clusters, engines in processes of their own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenlake.hints import Hints
from tokenlake.identity import SegmentKey
from tokenlake.layout import Layout
from tokenlake.wire import Code
from tokenlake_client import Deadlines, Lease, Pool
from tokenlake_testing.cluster import SERVER, Cluster, Node
from tokenlake_testing.fork_server import start_module

SEGMENT_TOKENS = 16
LAYOUT = Layout(
    model_id="test",
    weights_digest="00",
    dtype="float32",
    layers=2,
    kv_heads=2,
    key_dim=32,
    value_dim=32,
    position="rope",
    segment_tokens=SEGMENT_TOKENS,
)
"""Two shards; a segment takes 16 KiB."""
LIMIT_S = 30.0
"""A limit for calls that hang. No test depends on a shorter time."""
PATIENT_S = 2.0
"""Deadline of a call in a test that is not about deadlines."""
PATIENT = Deadlines(call_s=PATIENT_S, match_s=PATIENT_S, grace_s=PATIENT_S)
"""Deadlines of pools and engines in tests: on a busy machine a daemon may not run for a quarter of a second, and that
must not cause a miss."""


class Prompt:
    """Seeded tokens and the expected bytes of their cache: a function of every token up to a segment's end, computed
    without the pool's keys."""

    def __init__(self, seed: int, segments: int, shared: Prompt | None = None) -> None:
        """`shared`: begin with all of that prompt's tokens."""
        draw = random.Random(seed)
        head: list[int] = shared.tokens if shared is not None else []
        self.tokens: list[int] = head + [draw.randrange(1 << 17) for _ in range(segments * SEGMENT_TOKENS)]
        self.segments = len(self.tokens) // SEGMENT_TOKENS

    def content(self, index: int, layout: Layout = LAYOUT) -> bytes:
        """The bytes of one segment."""
        prefix = np.array(self.tokens[: (index + 1) * SEGMENT_TOKENS], dtype=np.uint32).tobytes()
        return hashlib.shake_128(prefix).digest(layout.segment_bytes)

    def fill(self, index: int, array: NDArray[np.uint8]) -> None:
        """For `Pool.store_all`."""
        array[:] = np.frombuffer(self.content(index, layout=LAYOUT)[: len(array)], dtype=np.uint8)

    def wrong(self, arrays: list[NDArray[np.uint8]], start: int = 0, layout: Layout = LAYOUT) -> int:
        """The number of arrays with wrong content; the first is that of segment `start`."""
        return sum(array.tobytes() != self.content(start + at, layout) for at, array in enumerate(arrays))


LOW = Hints(priority=-1)


def store(pool: Pool, prompt: Prompt, patience: float = LIMIT_S) -> bytes:
    """Store all of a prompt; the codes. Segments of low priority are evicted in order of their last access, and new
    ones are always admitted: tests fill the memory to evict what is not leased."""
    return pool.store_all(pool.prefix(prompt.tokens).keys, prompt.fill, patience=patience, hints=LOW)


def match(pool: Pool, prompt: Prompt, deadline_s: float = PATIENT_S) -> Lease:
    """Lease the longest prefix of a prompt that the pool has."""
    return pool.match(pool.prefix(prompt.tokens).keys, deadline_s=deadline_s)


def flip(pool: Pool, key: SegmentKey) -> bool:
    """Flip a bit of the copy at the pool's node; False where it has none."""
    with pool.match([key], deadline_s=PATIENT_S) as lease:
        if lease.codes[0] != Code.LOCAL:
            return False
        place = lease.places[0]
        slot = pool.link.regions.get(int(place["region"]), write=True).slots[place["slot"]]
        slot[len(slot) // 2] ^= np.uint8(1)
        return True


def read(pool: Pool, prompt: Prompt) -> int:
    """Fetch the prefix of a prompt that the pool has, compare it, and return the number of segments."""
    with match(pool, prompt) as lease:
        arrays = lease.fetch(deadline_s=LIMIT_S)
        assert prompt.wrong(arrays) == 0, "wrong bytes"
        return len(arrays)


def wait_until(reached: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until `reached()`. Raises AssertionError with `what` after `limit_s`."""
    until = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < until, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.01)


def total(node: Node, name: str) -> float:
    """A metric of one node, summed over its labels."""
    return sum(value for key, value in node.metrics().items() if key.split("{")[0] == name)


def all_free(node: Node) -> bool:
    """Nothing is leased, reserved or quarantined there: every slot is free or can be evicted."""
    return total(node, "tokenlake_quarantined_slots") == 0 and census(node) == 0


def census(node: Node) -> float:
    """Processes that may touch the node's arena."""
    return total(node, "tokenlake_processes")


IDLE = ("leases", "writes", "matches", "transfers", "leases to peers", "sends", "offers")
"""Maps of the rules that are empty when no request is under way."""


def accounted(node: Node) -> bool:
    """Every slot of the node is free or holds a segment, and nothing is leased, reserved, dirty or on its way."""
    metrics = node.metrics()

    def sum_of(name: str, label: str = "") -> float:
        return sum(value for key, value in metrics.items() if key.split("{")[0] == name and label in key)

    held = sum_of("tokenlake_free_slots") + sum_of("tokenlake_segments")
    under_way = [sum_of("tokenlake_map_entries", f'map="{name}"') for name in IDLE]
    under_way += [sum_of("tokenlake_quarantined_slots"), sum_of("tokenlake_segments", 'kind="dirty"')]
    return held == sum_of("tokenlake_slots") and not any(under_way)


def local_keys(pool: Pool, prompts: Sequence[Prompt]) -> set[bytes]:
    """The segments of the prompts that the pool's own node holds, with copies of any kind."""
    return _keys(pool, prompts, lambda lease: lease.codes[0] == Code.LOCAL)


def found_keys(pool: Pool, prompts: Sequence[Prompt]) -> set[bytes]:
    """The segments of the prompts that a pool finds anywhere."""
    return _keys(pool, prompts, lambda lease: lease.hits > 0)


def _keys(pool: Pool, prompts: Sequence[Prompt], wanted: Callable[[Lease], bool]) -> set[bytes]:
    found = set()
    for prompt in prompts:
        for key in pool.prefix(prompt.tokens).keys:
            with pool.match([key], deadline_s=PATIENT_S) as lease:
                if wanted(lease):
                    found.add(bytes(key))
    return found


def wait_told(cluster: Cluster) -> None:
    """Wait until no running node has a segment that is being written, and the directory nodes know the owners of all
    others."""
    running = [node for node in cluster.nodes if node.running]

    def done() -> bool:
        return not any(
            value
            for node in running
            for name, value in node.metrics().items()
            if name.startswith("tokenlake_segments{") and 'kind="dirty"' in name
        )

    wait_until(done, "all writes have ended")
    # A node that answers has sent the messages of earlier events, and has handled those that it received before: after
    # two rounds all `Owned`, and then all `Redundant`, have been handled.
    for _ in range(2):
        for node in running:
            node.metrics()


@contextlib.contextmanager
def daemons(nodes: int = 1, memory: str = "4MiB", region_size: str = "1MiB", **settings: str) -> Iterator[Cluster]:
    """A cluster with patient matches, so that a busy machine causes no miss, and with LRU eviction, so that a test
    knows the next victim. `record`: the event log of a recording daemon (`tests/recording_daemon.py`)."""
    settings.setdefault("match_deadline_ms", "2000")
    module = "tests.recording_daemon" if "record" in settings else SERVER
    with Cluster(nodes, memory, region_size, None, module, **settings) as cluster:
        cluster.deadlines = PATIENT
        yield cluster


class EngineProcess:
    """An engine in a process of its own (`tests.robustness.engine_process`), driven by commands."""

    def __init__(self, socket: Path, session: int = 0, credential: str = "", kv_heads: int = LAYOUT.kv_heads) -> None:
        (commands, ours), (theirs, answers) = os.pipe(), os.pipe()
        self._commands, self._answers = os.fdopen(ours, "w"), os.fdopen(theirs)
        arguments = [str(socket), str(session), credential, str(kv_heads)]
        self.process = start_module("tests.robustness.engine_process", arguments, {0: commands, 1: answers})
        os.close(commands)
        os.close(answers)
        self.session = self._answer()["session"]

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.thaw()
        self.kill()
        # A command that a killed engine did not read may be in the buffer.
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        self._answers.close()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Run a command there and wait for its answer."""
        self.begin(command, **arguments)
        answer = self._answer()
        assert "error" not in answer, answer
        return answer

    def begin(self, command: str, **arguments: Any) -> None:
        """Send a command; `finish` waits for its answer."""
        self._commands.write(json.dumps({"command": command, **arguments}) + "\n")
        self._commands.flush()

    def finish(self) -> dict[str, Any]:
        """The answer to `begin`."""
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        assert line, "the engine ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def freeze(self) -> None:
        """Send SIGSTOP and wait until the process is stopped."""
        freeze(self.process.pid)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        self.process.kill()
        self.process.wait()


def freeze(pid: int) -> None:
    """Send SIGSTOP and wait until the process is stopped."""
    os.kill(pid, signal.SIGSTOP)
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the process is stopped")


def outcomes(codes: bytes) -> set[Code]:
    """The distinct codes of a batch."""
    return {Code(code) for code in codes}


def pid_of(node: Node) -> int:
    """The process id of a daemon that was started."""
    assert node.process is not None
    return node.process.pid


def threads_of(pid: int) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors_of(pid: int) -> int:
    """Open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory_of(pid: int) -> int:
    """Private memory of a process in bytes: the arena, which is shared, does not count."""
    fields = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in fields if line.startswith(("Private_Dirty:", "Swap:")))
