"""Any reply of a daemon leads to a result of the promised shape, or to an error of `tokenlake.errors`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.hostile import hostile
from tests.profiles import examples
from tests.robustness.live import LAYOUT
from tokenlake.errors import TokenLakeError
from tokenlake.identity import LeaseId, SegmentKey, WriteId
from tokenlake.keys import probe
from tokenlake.wire import HEADER_BYTES, Code, engine, pack_frame
from tokenlake.wire.slots import SlotRef
from tokenlake_client import MatchOptions, Pool
from tokenlake_client.match import DEFAULT_MATCH

SLOTS = 4
REGION_BYTES = SLOTS * LAYOUT.segment_bytes
SECRET = b"s" * 32
KEYS = [SegmentKey(bytes([number]) * 32) for number in range(4)]
Answer = Callable[[Any], msgspec.Struct | None]


class FakeDaemon:
    """Sends the replies of `answer`. Where `answer` returns None, it sends a valid welcome, region or heartbeat
    reply."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.path = path
        self.answer = answer
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(str(path))
        self._sock.listen()
        self._memory = os.memfd_create("region")
        os.ftruncate(self._memory, REGION_BYTES)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._sock.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            file = connection.makefile("rb")
            while True:
                header = file.read(HEADER_BYTES)
                if len(header) < HEADER_BYTES:
                    raise EOFError
                request = engine.request_decoder.decode(file.read(int.from_bytes(header, "little")))
                reply = self.answer(request) or self._proper(request)
                if reply is not None and hasattr(reply, "id"):
                    reply = msgspec.structs.replace(reply, id=getattr(request, "id", 0))
                if isinstance(reply, engine.Region):
                    socket.send_fds(connection, [pack_frame(reply)], [self._memory])
                elif reply is not None:
                    connection.sendall(pack_frame(reply))

    @staticmethod
    def _proper(request: object) -> msgspec.Struct | None:
        match request:
            case engine.Hello():
                return engine.Welcome(
                    0, 1, "n0", 1, 1, 1, "red", SECRET, probe(SECRET, LAYOUT.fingerprint()), 3600.0, 1 << 20
                )
            case engine.OpenRegion():
                return engine.Region(0, request.region, REGION_BYTES, LAYOUT.segment_bytes)
            case engine.Heartbeat():
                return engine.HeartbeatReply(0, True)
        return None

    def close(self) -> None:
        self._sock.close()
        os.close(self._memory)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(tmp_path_factory.mktemp("daemon") / "socket", lambda request: None)
    yield fake
    fake.close()


slots = st.lists(
    st.builds(SlotRef, st.sampled_from([0, 0, 0, 1, (1 << 32) - 1]), st.sampled_from([0, 1, 3, 4, 99]), st.just(0)),
    max_size=4,
).map(lambda refs: b"".join(ref.pack() for ref in refs))
codes = st.lists(st.sampled_from([Code.LOCAL, Code.LOCAL, Code.REMOTE, Code.RESERVED, Code.LOST]), max_size=5).map(
    bytes
)
checksums = st.integers(0, 5).map(lambda count: bytes(8 * LAYOUT.shards * count))
matched = st.one_of(
    st.builds(engine.Matched, st.just(1), st.integers(0, 2), st.integers(0, 5), codes, slots, checksums),
    st.integers(1, 4).map(
        lambda hits: engine.Matched(
            1,
            1,
            hits,
            bytes([Code.LOCAL]) * 4,
            b"".join(SlotRef(0, at, 0).pack() for at in range(hits)),
            bytes(16 * hits),
        )
    ),
    hostile(engine.Matched),
)
prepared = st.one_of(st.builds(engine.Prepared, st.just(1), st.integers(0, 2), codes, slots), hostile(engine.Prepared))
fetched = st.one_of(st.builds(engine.Fetched, st.just(1), codes, slots, checksums), hostile(engine.Fetched))
committed = st.one_of(st.builds(engine.Committed, st.just(1), codes), hostile(engine.Committed))
placed = st.one_of(
    st.builds(engine.Located, st.just(1), st.just(("n1",)), st.lists(st.integers(0, 3), max_size=4).map(bytes)),
    hostile(engine.Located),
)
regions = st.one_of(st.none(), st.none(), hostile(engine.Region).filter(lambda region: region.region_bytes < 1 << 40))
other = st.sampled_from([engine.Failed, engine.HeartbeatReply, engine.Located]).flatmap(hostile)


def read(pool: Pool, options: MatchOptions = DEFAULT_MATCH) -> None:
    with pool.match(KEYS, options) as lease:
        assert lease.hits <= len(KEYS)
        arrays = lease.fetch()
        assert len(arrays) <= lease.hits
        assert all(array.shape == (LAYOUT.segment_bytes,) for array in arrays)
        lease.copy_into([np.empty(LAYOUT.segment_bytes, np.uint8) for _ in KEYS])
        lease.nodes()


def read_independent(pool: Pool) -> None:
    read(pool, MatchOptions(independent=True))


def attach(pool: Pool) -> None:
    with pool.engine.attach(LeaseId(1)) as lease:
        lease.fetch()


def write(pool: Pool) -> None:
    with pool.store(KEYS) as writing:
        writing.fill(lambda index, slot: slot.fill(7))


def attach_write(pool: Pool) -> None:
    with pool.engine.attach_write(WriteId(1)) as writing:
        writing.fill(lambda index, slot: slot.fill(7))


@pytest.mark.parametrize(
    "access", [read, read_independent, attach, write, attach_write], ids=lambda access: access.__name__
)
@pytest.mark.parametrize("verify", [False, True])
@given(data=st.data())
@settings(max_examples=examples(60))
def test_any_answer_is_a_result_or_an_error(
    daemon: FakeDaemon, access: Callable[[Pool], None], verify: bool, data: st.DataObject
) -> None:
    kinds = {
        engine.Match: matched,
        engine.Attach: prepared if access is attach_write else matched,
        engine.Prepare: prepared,
        engine.Fetch: fetched,
        engine.Commit: committed,
        engine.OpenRegion: regions,
        engine.Locate: placed,
    }
    script: dict[Any, Any] = {kind: data.draw(st.one_of(usual, usual, usual, other)) for kind, usual in kinds.items()}
    daemon.answer = lambda request: script.get(type(request))
    with Pool.connect(daemon.path, LAYOUT, verify=verify) as pool, contextlib.suppress(TokenLakeError):
        access(pool)


@given(welcome=hostile(engine.Welcome))
@settings(max_examples=examples(60))
def test_any_welcome_is_taken_or_refused(daemon: FakeDaemon, welcome: engine.Welcome) -> None:
    daemon.answer = lambda request: welcome if isinstance(request, engine.Hello) else None
    with contextlib.suppress(TokenLakeError):
        Pool.connect(daemon.path, LAYOUT).close()
