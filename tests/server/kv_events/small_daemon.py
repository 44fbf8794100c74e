"""`tokenlake serve` with streams of KV events that keep few messages, and a log of few changes."""

from __future__ import annotations

from tokenlake.memory import changes, store
from tokenlake_server.cli import serve
from tokenlake_server.kv_events import publisher

REPLAY_BYTES = 64 << 10
CHANGES = 1 << 12

if __name__ == "__main__":
    publisher.MAX_REPLAY_BYTES = REPLAY_BYTES
    log = changes.ChangeLog
    store.ChangeLog = lambda: log(CHANGES)  # type: ignore[assignment,misc,attr-defined]
    serve()
