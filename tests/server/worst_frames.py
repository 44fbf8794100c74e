"""The loop time that the worst frames of one engine cost: `python -m tests.server.worst_frames`.

A real daemon gets, from one connection each, the largest frames of every kind and many small frames in one write.
Prints the processor time of the longest callback of the control loop by kind of event, as the daemon's watchdog counts
it, and how many calls of a second engine were answered meanwhile; asserts nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from tests.robustness.live import LAYOUT, daemons
from tests.server.raw import Raw, hello
from tokenlake.errors import TokenLakeError
from tokenlake.hints import Hints, Outlook
from tokenlake.wire import engine, pack_frame
from tokenlake_testing.cluster import Cluster, Node

KEYS = 1024
"""Keys of the largest requests: the bound of this daemon (`tokenlake.wire.engine.MAX_KEYS`)."""
RANGES = 260_000
HEARTBEATS = 6500


def main() -> None:
    """Run every case on a daemon of its own and print a row for each."""
    draw = random.Random(1)
    keys = [draw.randbytes(32) for _ in range(KEYS)]
    cases: dict[str, Callable[[Raw], object]] = {
        f"a release of {RANGES:,} ranges of a lease": lambda raw: _released(raw, keys),
        f"{HEARTBEATS:,} heartbeats in one write": lambda raw: raw.write(
            b"".join(pack_frame(engine.Heartbeat(number)) for number in range(HEARTBEATS))
        ),
        "a match of 65,536 keys": lambda raw: raw.write(pack_frame(engine.Match(2, b"".join(keys) * 64, 0.1))),
        f"a match of {KEYS:,} keys": lambda raw: _ask(raw, engine.Match(2, b"".join(keys), 0.1)),
        f"prepare, match, hint and release of {KEYS:,} keys": lambda raw: _all(raw, keys),
    }
    for name, case in cases.items():
        with daemons(1, "256MiB", "64MiB", session_reserve_share="1.0", dirty_share="0.9") as cluster:
            print(name, _run(cluster, cluster.nodes[0], case), flush=True)


def _ask(raw: Raw, message: engine.EngineRequest) -> engine.EngineReply:
    raw.send(message)
    return raw.reply()


def _all(raw: Raw, keys: list[bytes]) -> None:
    packed, stored = b"".join(keys), 0
    while stored < len(keys):
        prepared = _ask(raw, engine.Prepare(3, b"".join(keys[stored : stored + engine.MAX_CHANGED]), stored))
        assert isinstance(prepared, engine.Prepared)
        got = tuple(at for at, code in enumerate(prepared.codes) if code == 16)
        assert got, set(prepared.codes)
        _ask(raw, engine.Commit(4, prepared.write, got, 3, bytes(16 * len(got))))
        stored += len(got)
    for spans in (1, len(keys)):
        matched = _ask(raw, engine.Match(5, packed, 0.1))
        assert isinstance(matched, engine.Matched)
        assert matched.hits == len(keys), matched.hits
        for at in range(0, len(keys), engine.MAX_CHANGED):
            raw.send(engine.Hint(b"".join(keys[at : at + engine.MAX_CHANGED]), Hints(Outlook.OVER), matched.lease))
        step = len(keys) // spans
        ranges = tuple((matched.lease, at, at + step) for at in range(0, len(keys), step))
        for some in engine.releasable(ranges):
            raw.send(engine.Release(some))
    _ask(raw, engine.Heartbeat(6))


def _released(raw: Raw, keys: list[bytes]) -> None:
    """Give back one item of a lease very often, in one frame."""
    prepared = _ask(raw, engine.Prepare(3, b"".join(keys[:8]), 0))
    assert isinstance(prepared, engine.Prepared)
    _ask(raw, engine.Commit(4, prepared.write, tuple(range(8)), 3, bytes(128)))
    matched = _ask(raw, engine.Match(5, b"".join(keys[:8]), 0.1))
    assert isinstance(matched, engine.Matched)
    raw.write(pack_frame(engine.Release(((matched.lease, 0, 1),) * RANGES)))


def _run(cluster: Cluster, node: Node, case: Callable[[Raw], object]) -> str:
    answered = [0, 0]
    stop = threading.Event()

    def other() -> None:
        with cluster.connect(0, LAYOUT) as pool:
            keys = pool.prefix(range(64)).keys
            while not stop.is_set():
                try:
                    pool.match(keys, deadline_s=0.02).release()
                    answered[0] += 1
                except TokenLakeError:
                    answered[1] += 1
                time.sleep(0.01)

    thread = threading.Thread(target=other)
    thread.start()
    with Raw(node.socket) as raw:
        raw.send(hello())
        raw.reply()
        reader = threading.Thread(target=_drain, args=(raw,)) if case.__code__.co_names[0] != "_all" else None
        case(raw)
        if reader is not None:
            reader.start()
        raw2 = Raw(node.socket)
        with raw2:
            raw2.send(hello())
            raw2.reply()
            _ask(raw2, engine.Heartbeat(1))
        time.sleep(1.0)
        stop.set()
        thread.join()
    if reader is not None:
        reader.join()
    longest = {
        key.partition('kind="')[2].rstrip('"}'): f"{value * 1e3:.1f} ms"
        for key, value in node.metrics().items()
        if key.startswith("tokenlake_longest_callback_seconds")
    }
    return f"longest: {longest}; the other engine: {answered[0]} answered, {answered[1]} failed"


def _drain(raw: Raw) -> None:
    raw.sock.settimeout(1.0)
    try:
        while raw.sock.recv(1 << 20):
            pass
    except OSError:
        pass


if __name__ == "__main__":
    main()
