"""A process that uses a cold tier and kills itself at one call: python -m tests.server.cold.killed PATH CALL PREFIX
NUMBER AFTER. It ends by SIGKILL before the call of this number with a path of this prefix, counted from the first write
with a path of the prefix AFTER on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from tests.server.cold.scene import Scene, served, until
from tokenlake_server.cold.sealed import object_bytes

SIZE = 40


def main(path: str, call: str, prefix: str, number: str, after: str) -> None:
    scene = Scene(Path(path), size=SIZE * object_bytes(64 << 10))
    left = [int(number)]
    begun = not after
    lock = threading.Lock()

    def before(name: str, at: str) -> None:
        nonlocal begun
        with lock:
            if begun and name == call and at.startswith(prefix):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            begun |= name == "write" and at.startswith(after)

    with served(scene):
        scene.before = before
        segment = 0

        def more() -> bool:
            nonlocal segment
            segment += scene.write([segment]) == b"\x12"
            return segment == 1000

        until(more, "it writes")


if __name__ == "__main__":
    main(*sys.argv[1:])
