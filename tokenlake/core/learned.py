"""What a node's policy of eviction learned, as bytes that outlive the process.

Statistics of each pool, by tenant and slot size; no key, token or secret.
"""

from __future__ import annotations

import msgspec

from tokenlake.core.context import Context
from tokenlake.identity import TenantId
from tokenlake.store.eviction import policy_named

__all__ = ["MAX_LEARNED_BYTES", "Learned"]

MAX_LEARNED_BYTES = 16 << 20
"""More than any node saves."""


class _Saved(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    policy: str
    pools: tuple[tuple[str, int, bytes], ...]
    """(tenant, slot bytes, what `EvictionPolicy.save` gave)."""


_decoder = msgspec.msgpack.Decoder(_Saved)


class Learned:
    """Of one node."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def save(self) -> bytes:
        """All of it, also of pools that have no memory now. Changes nothing."""
        pools = tuple((tenant, size, data) for (tenant, size), data in self._context.store.learned().items())
        return msgspec.msgpack.encode(_Saved(self._context.config.eviction, pools))

    def restore(self, data: bytes) -> None:
        """Begin with what an earlier life saved; before there are segments. Raises `ValueError` that says why it is not
        usable; nothing is changed then."""
        try:
            if len(data) > MAX_LEARNED_BYTES:
                raise ValueError(f"{len(data)} bytes; at most {MAX_LEARNED_BYTES}")
            saved = _decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"no statistics of eviction: {error}") from error
        here = self._context.config.eviction
        if saved.policy != here:
            raise ValueError(f"statistics of the policy {saved.policy!r}; this node runs {here!r}")
        for _, _, learned in saved.pools:
            policy_named(here)().restore(learned)
        self._context.store.remember({(TenantId(name), size): learned for name, size, learned in saved.pools})
