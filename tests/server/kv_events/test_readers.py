"""The readers of the tests: one that comes late misses nothing, and a wait that ends in vain shows its value."""

from __future__ import annotations

import pytest

zmq = pytest.importorskip("zmq")

from tests.server.kv_events.readers import Subscriber  # noqa: E402
from tests.server.kv_events.scene import until  # noqa: E402

ADDRESS = "tcp://127.0.0.1"


def test_a_subscriber_asks_for_messages_that_came_before_it() -> None:
    """vLLM sends nothing of its own accord to a reader that comes late."""
    taken: list[bytes] = []
    with zmq.Context() as context, context.socket(zmq.PUB) as events, context.socket(zmq.ROUTER) as replay:
        sent_at, asked_at = (each.bind_to_random_port(ADDRESS) for each in (events, replay))
        events.send_multipart([b"topic", bytes(8), b"first"])

        def answer() -> list[bytes]:
            if replay.poll(20):
                reader, _, start = replay.recv_multipart()
                if start == bytes(8):
                    replay.send_multipart([reader, b"", b"topic", bytes(8), b"first"])
                replay.send_multipart([reader, b"", b"", b"\xff" * 8, b""])
            return taken

        with Subscriber(f"{ADDRESS}:{sent_at}", f"{ADDRESS}:{asked_at}", lambda _, payload: taken.append(payload)):
            until([b"first"], answer)


@pytest.mark.parametrize(("found", "shown"), [(2, "2, not 1"), ([1, 3, 5], r"\[\(3, 2\)\]")])
def test_a_wait_in_vain_shows_what_it_found(found: object, shown: str) -> None:
    expected = [1, 2, 5] if isinstance(found, list) else 1
    with pytest.raises(AssertionError, match=shown):
        until(expected, lambda: found, limit_s=0)
