"""`tokenlake serve` on a machine whose clock is an hour ahead."""

from __future__ import annotations

import time

from tokenlake_server.cli import serve

AHEAD_S = 3600.0

if __name__ == "__main__":
    right = time.time
    time.time = lambda: right() + AHEAD_S
    serve()
