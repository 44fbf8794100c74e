"""An engine in its own process, driven by one JSON command per line: for faults of processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.robustness.live import LAYOUT, PATIENT, PATIENT_S, Prompt, store
from tokenlake.errors import TokenLakeError
from tokenlake.identity import LeaseId, SessionId, WriteId
from tokenlake.layout import Layout
from tokenlake_client import Lease, Pool, Write


class Engine:
    """Holds at most one lease with its arrays, and one write."""

    def __init__(self, pool: Pool, layout: Layout) -> None:
        self.pool, self.layout = pool, layout
        self.looked_at = self.filled = Prompt(0, 1)
        self.lease: Lease | None = None
        self.arrays: list[Any] = []
        self.write: Write | None = None

    def store(self, seed: int, segments: int) -> dict[str, Any]:
        return {"codes": list(store(self.pool, Prompt(seed, segments)))}

    def match(self, seed: int, segments: int, fetch: bool = True) -> dict[str, Any]:
        """Lease and fetch the segments of a prompt, and keep the arrays."""
        self.looked_at = Prompt(seed, segments)
        keys = self.pool.prefix(self.looked_at.tokens).keys
        self.lease = self.pool.match(keys, deadline_s=PATIENT_S)
        self.arrays = self.lease.fetch() if fetch else []
        return {"hits": len(self.arrays), "wrong": self.looked_at.wrong(self.arrays), "lease": self.lease.ids}

    def attach(self, lease: Sequence[int], seed: int, segments: int) -> dict[str, Any]:
        """Read segments that another process of the session leased."""
        self.looked_at = Prompt(seed, segments)
        self.lease = self.pool.engine.attach(*map(LeaseId, lease))
        self.arrays = self.lease.fetch()
        return {"hits": len(self.arrays), "wrong": self.looked_at.wrong(self.arrays, layout=self.layout)}

    def compare(self) -> dict[str, Any]:
        return {"wrong": self.looked_at.wrong(self.arrays), "hits": len(self.arrays)}

    def release(self) -> dict[str, Any]:
        self.arrays = []
        assert self.lease is not None
        self.lease.release()
        return {}

    def prepare(self, seed: int, segments: int) -> dict[str, Any]:
        """Reserve, and fill half."""
        self.filled = Prompt(seed, segments)
        self.write = self.pool.store(self.pool.prefix(self.filled.tokens).keys)
        return {"codes": list(self.write.codes), "write": self.write.id}

    def attach_write(self, write: int, seed: int, segments: int) -> dict[str, Any]:
        self.filled = Prompt(seed, segments)
        self.write = self.pool.engine.attach_write(WriteId(write))
        return {"codes": list(self.write.codes)}

    def fill(self) -> dict[str, Any]:
        assert self.write is not None
        for index, array in self.write.slots:
            self.filled.fill(index, array)
        return {}

    def commit(self, shards: Sequence[int] = ()) -> dict[str, Any]:
        """Commit all; or fill the shards [first, stop), commit these, and leave the write."""
        assert self.write is not None
        if not shards:
            return {"codes": list(self.write.commit())}
        first, stop = shards
        rank = slice(first * self.layout.shard_bytes, stop * self.layout.shard_bytes)
        for index, array in self.write.slots:
            array[rank] = np.frombuffer(self.filled.content(index, self.layout)[rank], np.uint8)
        codes = list(self.write.commit((1 << stop) - (1 << first)))
        self.write.leave()
        return {"codes": codes}

    def leave(self) -> dict[str, Any]:
        """Close the pool, and keep the arrays."""
        self.pool.close()
        return {}

    def fork(self) -> dict[str, Any]:
        """A child that waits to be killed."""
        child = os.fork()
        if not child:
            self.pool.close()
            signal.pause()
        return {"child": child}

    def fork_and_read(self) -> dict[str, Any]:
        """Fork a child that reads its parent's arrays. Returns the signal that ends the child; 0 for none."""
        child = os.fork()
        if not child:
            os._exit(int(self.arrays[0][0]) * 0)
        return {"signal": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) * -1}

    def limit(self, nbytes: int | None) -> dict[str, Any]:
        """Let the process map so many bytes more than now; None: without a limit."""
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = resource.RLIM_INFINITY if nbytes is None else used + nbytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        return {}

    def state(self) -> dict[str, Any]:
        return {
            "timeouts": self.pool.engine.timeouts,
            "expired": self.pool.engine.expired,
            "connected": self.pool.connected,
        }


def main(socket: str, session: str, credential: str, kv_heads: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, kv_heads=int(kv_heads))
    pool = Pool.connect(Path(socket), layout, credential or None, session=SessionId(int(session)), deadlines=PATIENT)
    engine = Engine(pool, layout)
    print(json.dumps({"session": engine.pool.engine.session}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(engine, request.pop("command"))(**request)
        except (TokenLakeError, OSError, MemoryError) as error:
            answer = {"error": type(error).__name__, "reason": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
