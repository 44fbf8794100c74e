"""The memory that the connections of one tenant cost a daemon: `python -m tests.server.worst_memory`.

A real daemon of two nodes, of which the other one is frozen, gets the worst that connections can make it keep. Prints
the private memory of the daemon, with its arena of 1 MiB, before and after each case; asserts nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable

from tests.robustness.live import daemons, memory_of, wait_until
from tests.server.raw import Raw, hello
from tests.server.test_limits import keys_at
from tokenlake.wire import engine, pack_frame
from tokenlake_testing.cluster import Cluster

MIB = 1 << 20
KEYS = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
"""Keys of a match; 65,536 for a daemon without the limit."""


def main() -> None:
    """Run every case on daemons of its own and print a row for each."""
    cases: dict[str, Callable[[Cluster, contextlib.ExitStack], None]] = {
        "60 connections that never say hello and send most of a frame": _silent,
        f"40 connections with 32 waiting matches of {KEYS:,} keys each": _waiting,
        "40 connections with answers of 16 MiB that are never read": _unread,
    }
    for name, case in cases.items():
        with daemons(2, "1MiB", "1MiB", suspect_ms="20000") as cluster, contextlib.ExitStack() as open_:
            process = cluster.nodes[0].process
            assert process is not None
            cluster.nodes[1].freeze()
            before = memory_of(process.pid)
            case(cluster, open_)
            after = memory_of(process.pid)
            print(f"{name}: {before / MIB:.0f} -> {after / MIB:.0f} MiB", flush=True)
            cluster.nodes[1].thaw()


def _joined(cluster: Cluster, open_: contextlib.ExitStack) -> Raw:
    raw = open_.enter_context(Raw(cluster.nodes[0].socket))
    raw.send(hello())
    raw.reply()
    return raw


def _handled(cluster: Cluster, rows: list[Raw]) -> None:
    """Wait until the daemon has read what it will read, and serves another engine."""
    with contextlib.ExitStack() as other:
        raw = _joined(cluster, other)
        for number in range(2, 200):
            raw.send(engine.Heartbeat(number))
            raw.reply()
    wait_until(lambda: bool(cluster.nodes[0].metrics()), "it serves")


def _silent(cluster: Cluster, open_: contextlib.ExitStack) -> None:
    rows = [open_.enter_context(Raw(cluster.nodes[0].socket)) for _ in range(60)]
    for raw in rows:
        raw.sock.settimeout(0.3)
        with contextlib.suppress(OSError):
            raw.write((4 * MIB).to_bytes(4, "little") + bytes(4 * MIB - 1))
    _handled(cluster, rows)


def _waiting(cluster: Cluster, open_: contextlib.ExitStack) -> None:
    keys = b"".join(itertools.islice(keys_at(cluster, 1), min(KEYS, 4096))) * max(1, KEYS // 4096)
    rows = [_joined(cluster, open_) for _ in range(40 if KEYS == 1024 else 1)]
    for raw in rows:
        raw.sock.settimeout(2.0)
        for number in range(2, 34):
            raw.write(pack_frame(engine.Match(number, keys, 2.0, in_flight_wait_s=10.0)))
    _handled(cluster, rows)


def _unread(cluster: Cluster, open_: contextlib.ExitStack) -> None:
    rows = [_joined(cluster, open_) for _ in range(40)]
    body = b"".join(pack_frame(engine.Explain(number, "x" * 64)) for number in range(2, 1000))
    for raw in rows:
        raw.sock.settimeout(0.3)
        with contextlib.suppress(OSError):
            for _ in range(80):
                raw.write(body)
    _handled(cluster, rows)


if __name__ == "__main__":
    main()
