"""Tokens with which a browser reads the page: the control plane grants them, and nothing of them is stored.

::

    token = base64url(mac | terms)      terms = MessagePack of [end on the daemon's clock, tenant]
                                        mac   = HMAC-SHA256(secret of this start of the daemon, terms)
"""

from __future__ import annotations

import base64
import hmac
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from tokenlake.errors import CredentialRefused

DEFAULT_S, MAX_S = 8 * 3600.0, 30 * 86_400.0
"""Seconds for which a token is valid: by default, and at most."""
MAX_TOKEN = 2048
"""Limit of the characters of a token."""
_MAC_BYTES = 32


class _Terms(msgspec.Struct, frozen=True, array_like=True):
    end: float
    tenant: str


class Grant(NamedTuple):
    """What a token allows."""

    tenant: str
    """The only tenant that is shown; empty for all."""
    left_s: float
    """Seconds for which the token is still valid."""


class PageTokens:
    """Makes and checks tokens. They end with this object. May be used by several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        self._decoder = msgspec.msgpack.Decoder(_Terms)

    def grant(self, tenant: str, valid_s: float) -> str:
        """A token for the page that shows one tenant, or all (empty), for `valid_s` seconds."""
        terms = msgspec.msgpack.encode(_Terms(self._clock() + valid_s, tenant))
        return base64.urlsafe_b64encode(self._mac(terms) + terms).rstrip(b"=").decode()

    def check(self, token: str) -> Grant:
        """What the token allows. Raises `CredentialRefused`, whose text is for people and has nothing of the token."""
        content = _decoded(token)
        mac, terms = content[:_MAC_BYTES], content[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(terms)):
            raise CredentialRefused("this daemon did not make the token since its start")
        found = self._decoder.decode(terms)
        left_s = found.end - self._clock()
        if left_s <= 0:
            raise CredentialRefused("the token has expired")
        return Grant(found.tenant, left_s)

    def _mac(self, terms: bytes) -> bytes:
        return hmac.digest(self._secret, terms, "sha256")


def _decoded(token: str) -> bytes:
    """The bytes of a token; none for a text that cannot be one."""
    if len(token) > MAX_TOKEN:
        return b""
    try:
        return base64.b64decode((token + "=" * (-len(token) % 4)).encode("ascii"), altchars=b"-_", validate=True)
    except ValueError:
        return b""
