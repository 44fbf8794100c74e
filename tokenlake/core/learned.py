"""What a node's policy of eviction learned: told to the other nodes, and as bytes that outlive the process.

Statistics of each pool, by tenant and slot size; no key, token or secret. Of a prompt a node sees but the segments that
lie there: where nodes tell each other, each decides nearly as if it saw all, and all weigh a prompt's segments alike.
"""

from __future__ import annotations

import msgspec

from tokenlake.core.context import Context
from tokenlake.core.instructions import Note
from tokenlake.core.peers import Peers
from tokenlake.identity import TenantId
from tokenlake.store import PoolId
from tokenlake.store.eviction import policy_named
from tokenlake.wire import peer as wire

__all__ = ["MAX_LEARNED_BYTES", "Learned"]

TELL_S = 2.0
"""From one telling to the next."""
TOLD = 4
"""Pools in one telling; others in turn."""
MAX_LEARNED_BYTES = 16 << 20
"""More than any node saves."""


class _Saved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    policy: str
    pools: tuple[tuple[str, int, bytes], ...]
    """(tenant, slot bytes, what `EvictionPolicy.save` gave)."""


_decoder = msgspec.msgpack.Decoder(_Saved)


class Learned:
    """Of one node."""

    def __init__(self, context: Context, peers: Peers) -> None:
        self._context = context
        self._peers = peers
        self._turn = 0
        """How often others were told."""
        self._complained = False

    def start(self) -> None:
        """Tell one peer after the other."""
        self._context.after(TELL_S, self._tell)

    def _tell(self) -> None:
        reachable = [peer.node for peer in self._peers if peer.reachable]
        # A lone node has nobody to tell, and nothing to put together.
        learned = self._context.store.learned() if reachable else {}
        pools = [(tenant, size, data) for (tenant, size), data in learned.items()]
        if pools:
            node = reachable[self._turn % len(reachable)]
            # The next pools when all were told of these: else each would hear of the same ones every time.
            first = self._turn // len(reachable) * TOLD % len(pools)
            told = (pools[first:] + pools[:first])[:TOLD]
            self._peers.tell(node, wire.EvictionStatistics(self._context.config.eviction, tuple(told)))
            self._turn += 1
        self.start()

    def heard(self, message: wire.EvictionStatistics) -> None:
        """Another node learned this. What is not usable (another policy, another version) is noted once."""
        try:
            if message.policy != self._context.config.eviction:
                raise ValueError(f"another node's policy is {message.policy!r}")
            self._context.store.merge_learned(
                {PoolId(TenantId(name), size): data for name, size, data in message.pools}
            )
        except ValueError as error:
            if not self._complained:
                self._context.emit(Note(f"statistics of eviction of another node are not used: {error}"))
            self._complained = True

    def save(self) -> bytes:
        """All of it, also of pools that have no memory now. Changes nothing."""
        pools = tuple((tenant, size, data) for (tenant, size), data in self._context.store.learned().items())
        return msgspec.msgpack.encode(_Saved(self._context.config.eviction, pools))

    def check(self, data: bytes) -> None:
        """Raises `ValueError` that says why `restore` cannot use it. Changes nothing."""
        saved = self._decoded(data)
        here = self._context.config.eviction
        if saved.policy != here:
            raise ValueError(f"statistics of the policy {saved.policy!r}; this node runs {here!r}")
        for _, _, learned in saved.pools:
            policy_named(here)().restore(learned)

    def restore(self, data: bytes) -> None:
        """Begin with what an earlier life saved, which passed `check`; before there are segments."""
        saved = self._decoded(data)
        self._context.store.restore_learned(
            {PoolId(TenantId(name), size): learned for name, size, learned in saved.pools}
        )

    def _decoded(self, data: bytes) -> _Saved:
        try:
            if len(data) > MAX_LEARNED_BYTES:
                raise ValueError(f"{len(data)} bytes; at most {MAX_LEARNED_BYTES}")
            return _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"no statistics of eviction: {error}") from error
