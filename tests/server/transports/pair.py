"""Two nodes of this process: one lends its segments, the other one reads them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from tests.robustness.live import LIMIT_S, wait_until
from tests.server.transports.fake_agent import Fabric
from tokenlake.config import Address
from tokenlake.core.events import Event, FetchDone, FetchSettled, PullRequested, SendDone
from tokenlake.core.instructions import AbortFetch, SendBulk, StartFetch
from tokenlake.memory.region import RegionShape
from tokenlake.wire import Code, pack_frame, peer
from tokenlake.wire.frames import decode
from tokenlake.wire.slots import SlotRef
from tokenlake_server.bulk.blocking_sockets import read_frame
from tokenlake_server.bulk.choice import Transports
from tokenlake_server.bulk.receiver import BulkReceiver
from tokenlake_server.bulk.sender import BulkSender
from tokenlake_server.bulk.tcp import Tcp
from tokenlake_server.engines.arena import Arena
from tokenlake_server.nixl.agent import Agent
from tokenlake_server.nixl.transport import Nixl
from tokenlake_server.peers.addresses import PeerAddresses
from tokenlake_server.peers.handshake import NONCE_BYTES, Acceptor, PeerIdentity

REGION = 64 << 20
NETWORKS = ("a network",)


class Node:
    """An arena with transports, and the events of the daemon's parts in place of the rules."""

    def __init__(self, name: str, make: Callable[[str], Any] | None) -> None:
        self.name = name
        self.arena = Arena()
        self.arena.make(0, REGION)
        self.nixl = Nixl(name, 1, self.arena, NETWORKS, make) if make is not None else None
        if self.nixl is not None:
            self.nixl.add(0)
        self.transports = Transports(Tcp(self.arena), self.nixl)
        self.identity = PeerIdentity(name, 1)
        self.sinks: dict[type, Any] = {}
        self.held: dict[bytes, tuple[SlotRef, bytes]] = {}
        """The segments: place and checksums, by key."""
        self.size = 0
        self.answers = True
        """False: a request gets no answer."""
        self.asked = self.answered = self.sent = 0
        self.done: dict[int, FetchDone] = {}
        self.settled: set[int] = set()

    def carry_out(self, kind: type, sink: Any) -> None:
        self.sinks[kind] = sink

    def post(self, event: Event) -> None:
        match event:
            case PullRequested():
                self.asked += 1
                if self.answers:
                    self.answered += 1
                    self.sinks[SendBulk](self._answer(event))
            case SendDone():
                self.sent += 1
            case FetchDone():
                assert event.fetch not in self.done, "a fetch ends once"
                self.done[event.fetch] = event
            case FetchSettled():
                assert any(self.done[event.fetch].held), "it follows a fetch that holds slots"
                assert event.fetch not in self.settled
                self.settled.add(event.fetch)

    def _answer(self, event: PullRequested) -> SendBulk:
        keys = [event.keys[at : at + 32] for at in range(0, len(event.keys), 32)]
        found = [self.held[key] for key in keys if key in self.held]
        codes = bytes(Code.LOCAL if key in self.held else Code.LOST for key in keys)
        slots = b"".join(slot.pack() for slot, _ in found)
        return SendBulk(event.stream, self.size if keys else 0, codes, slots, b"".join(sums for _, sums in found))

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot."""
        return self.arena.slots([SlotRef(0, number, 1)], self.size)[0]

    def close(self) -> None:
        if self.nixl is not None:
            self.nixl.close()
        self.arena.close()


class Pair:
    """`reader` fetches what `owner` holds."""

    def __init__(self, size: int, count: int, shards: int, make: Callable[[str], Any] | None) -> None:
        self.owner, self.reader = Node("owner", make), Node("reader", make)
        self.receiver: BulkReceiver
        self.keys = [bytes([number]) * 32 for number in range(count)]
        self.shards = shards
        assert RegionShape(REGION, size).slots >= count
        self.owner.size = self.reader.size = size
        draw = np.random.default_rng(size)
        self.content = [draw.integers(0, 256, size, dtype=np.uint8).tobytes() for _ in range(count)]
        for number, key in enumerate(self.keys):
            self.owner.slot(number)[:] = self.content[number]
            self.owner.held[key] = SlotRef(0, number, 1), self._checksums(self.content[number])
        self._fetches = 0

    def _checksums(self, content: bytes) -> bytes:
        step = len(content) // self.shards
        parts = [content[at : at + step] for at in range(0, len(content), step)]
        return b"".join(xxhash.xxh3_64_intdigest(part).to_bytes(8, "little") for part in parts)

    def start(self, answer_s: float = LIMIT_S, keys: Sequence[bytes] | None = None) -> int:
        """Begin to fetch all segments into the reader's slots of the same numbers, which have other bytes now."""
        self._fetches += 1
        wanted = self.keys if keys is None else keys
        for number in range(len(wanted)):
            self.reader.slot(number)[:] = bytes([0xEE]) * self.reader.size
        slots = b"".join(SlotRef(0, number, 1).pack() for number in range(len(wanted)))
        packed, size = b"".join(wanted), self.reader.size
        self.reader.sinks[StartFetch](
            StartFetch(self._fetches, "owner", "t", packed, slots, size, self.shards, answer_s)
        )
        return self._fetches

    def abort(self, fetch: int) -> None:
        self.receiver.abort(AbortFetch(fetch))

    def end(self, fetch: int) -> FetchDone:
        """Wait for the end of a fetch. What it reports as LOCAL has the right bytes."""
        wait_until(lambda: fetch in self.reader.done, "the fetch has ended")
        done = self.reader.done[fetch]
        for number, code in enumerate(done.codes):
            assert (code != Code.LOCAL) or bytes(self.reader.slot(number)) == self.content[number]
            assert not (done.held and done.held[number] and code == Code.LOCAL)
        return done

    def fetch(self) -> FetchDone:
        """Fetch all segments."""
        return self.end(self.start())

    def read_with_nixl(self) -> bool:
        """True if the reader may read the owner's memory now."""
        return self.reader.transports.offer("owner") != ("", 0)

    def introduce(self) -> None:
        """Tell the reader the present agent of the owner."""
        assert self.owner.nixl is not None
        assert self.reader.nixl is not None
        self.reader.nixl.heard("owner", self.owner.nixl.introduction)


@contextlib.contextmanager
def pair(
    size: int, count: int = 4, shards: int = 1, *, nixl: bool = False, fabric: Fabric | None = None
) -> Iterator[Pair]:
    """`nixl`: the nodes have NIXL; `fabric`: it is a fake."""
    made = Pair(size, count, shards, (fabric.make if fabric is not None else Agent) if nixl else None)
    owner: Any = made.owner
    reader: Any = made.reader
    sender = BulkSender(owner.arena, owner, owner.transports)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, made.owner, sender), daemon=True).start()
        addresses = PeerAddresses({"owner": Address(*listener.getsockname())})
        receiver = made.receiver = BulkReceiver(
            reader.identity, addresses, reader.arena, reader, transports=reader.transports
        )
        try:
            if made.reader.nixl is not None and made.owner.nixl is not None:
                made.owner.nixl.tell = made.introduce
                made.reader.nixl.start(receiver.connections)
                made.introduce()
                wait_until(made.read_with_nixl, "a probe has come")
            yield made
        finally:
            receiver.close()
            sender.close()
            made.reader.close()
            made.owner.close()


def _accept(listener: socket.socket, owner: Node, sender: BulkSender) -> None:
    """Complete handshakes, and hand the connections to the sender."""
    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            hello = decode(peer.handshake_decoder, read_frame(sock, peer.HANDSHAKE_BYTES))
            assert isinstance(hello, peer.PeerHello)
            sock.sendall(pack_frame(Acceptor(owner.identity, hello, bytes(NONCE_BYTES)).challenge))
            read_frame(sock, peer.HANDSHAKE_BYTES)
            sock.sendall(pack_frame(peer.PeerWelcome()))
            sender.adopt(sock, hello, None)
