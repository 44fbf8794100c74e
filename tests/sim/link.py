"""The control connection between two simulated nodes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tests.sim.clock import Channel
from tests.sim.node import SimNode
from tests.sim.transfer import Transfer
from tokenlake.core import events
from tokenlake.wire import peer
from tokenlake.wire.frames import decode, encode

RETRY_S = 0.05


class Link:
    """Delivers frames in order while it is up; can be cut, comes up again, and can drop or double single frames."""

    def __init__(self, a: SimNode, b: SimNode) -> None:
        self.ends: Mapping[str, SimNode] = {a.name: a, b.name: b}
        self.up = False
        self.blocked_until = 0.0
        self.drop = 0
        self.double = 0
        self._clock = a.cluster.clock
        self._life = 0
        self._to = {name: Channel(self._clock, partial(self._arrive, node)) for name, node in self.ends.items()}
        self._connect(0)

    def _arrive(self, node: SimNode, event: events.Event) -> None:
        node.deliver(event)

    def _connect(self, life: int) -> None:
        if life != self._life:
            return
        able = all(node.knows(self._other(name).name) and not node.frozen for name, node in self.ends.items())
        if not able or self._clock.now < self.blocked_until:
            self._clock.after(RETRY_S, lambda: self._connect(life))
            return
        self.up = True
        for name, channel in self._to.items():
            other = self._other(name)
            channel.send(events.PeerUp(other.name, other.incarnation, other.config.location))

    def _other(self, name: str) -> SimNode:
        return next(node for end, node in self.ends.items() if end != name)

    def say(self, sender: str, message: peer.PeerMessage) -> None:
        """Send a frame from `sender` to the other end."""
        if not self.up:
            return
        if self.drop:
            self.drop -= 1
            return
        copies = 2 if self.double else 1
        self.double -= copies - 1
        arrived = decode(peer.peer_decoder, encode(message))
        for _ in range(copies):
            self._to[self._other(sender).name].send(events.PeerSent(sender, arrived))

    def cut(self, seconds: float = 0.0) -> None:
        """Lose all frames and transfers under way; come up again after `seconds` at the earliest."""
        self.blocked_until = max(self.blocked_until, self._clock.now + seconds)
        if self.up:
            self.up = False
            for name, node in self.ends.items():
                self._to[name].cut()
                other = self._other(name)
                if node.knows(other.name):
                    node.deliver(events.PeerDown(other.name, other.incarnation))
                for transfer in list(node.life.receives.values()):
                    if isinstance(transfer, Transfer) and transfer.source is other:
                        transfer.fail()
        self._life += 1
        life = self._life
        self._clock.after(RETRY_S, lambda: self._connect(life))

    def heal(self) -> None:
        """End all faults."""
        self.blocked_until = 0.0
        self.drop = self.double = 0
