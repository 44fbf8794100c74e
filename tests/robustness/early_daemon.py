"""`tokenlake serve` on a machine whose clock is a year late: its incarnation is smaller than earlier ones."""

from __future__ import annotations

import time

from tokenlake_server.cli import serve

YEAR_NS = 365 * 86_400 * 10**9

now = time.time_ns


if __name__ == "__main__":
    time.time_ns = lambda: now() - YEAR_NS
    serve()
