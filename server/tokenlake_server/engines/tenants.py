"""Maps a local process to its tenant: by the token that it sends, else by its uid."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Iterator

from tokenlake.config import Secret, ServerConfig, Tenant
from tokenlake.errors import CredentialRefused

log = logging.getLogger(__name__)

DEFAULT_TENANT = "default"
DEFAULT_SECRET = Secret(hashlib.blake2b(b"tokenlake: the only tenant", digest_size=32).digest())
"""Secret of the tenant 'default'. It is public: a single tenant has no other tenant to be protected from, and every
node of the pool must derive the same keys without configuration."""


def digests(config: ServerConfig) -> dict[str, bytes]:
    """For each tenant by name, 16 bytes that follow from its name and secret."""
    tenants = {tenant.name: tenant.secret for tenant in config.tenants} or {DEFAULT_TENANT: DEFAULT_SECRET}
    return {
        name: hashlib.blake2b(name.encode(), key=bytes(secret), digest_size=16).digest()
        for name, secret in tenants.items()
    }


class Tenants:
    """The tenants of one daemon, by their tokens and user ids. Immutable."""

    query_credential: str
    """The token with which this daemon's query engine may act for any tenant; no other process knows it
    (`supervision.Start`)."""

    def __init__(self, config: ServerConfig) -> None:
        allowed = config.allow_uids or (os.getuid(),)
        self._tenants = config.tenants or (Tenant(name=DEFAULT_TENANT, secret=DEFAULT_SECRET, uids=allowed),)
        self.query_credential = secrets.token_hex(32)
        self._allowed = (*allowed, *(uid for tenant in self._tenants for uid in tenant.uids))
        if len(self._tenants) > 1 and os.getuid() in self._allowed:
            log.warning(
                "tenants are not protected from processes of uid %d, which may use this daemon and is its own uid: "
                "through /proc they can open the memory of every tenant; run engines as other users, and leave the uid "
                "out of 'allow_uids'",
                os.getuid(),
            )

    @property
    def count(self) -> int:
        """The number of tenants."""
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        """Yields the tenants."""
        return iter(self._tenants)

    def user(self, uid: int) -> int:
        """The user id, or -1 for all users that may not use this daemon."""
        return uid if uid in self._allowed else -1

    def is_query_engine(self, token: str | None) -> bool:
        """True when `token` is the credential of this daemon's query engine."""
        credential = (token or "").partition(":")[0]
        return hmac.compare_digest(credential.encode(), self.query_credential.encode())

    def _of_token(self, token: str) -> Tenant:
        for tenant in self._tenants:
            if any(hmac.compare_digest(token.encode(), known.encode()) for known in tenant.tokens):
                return tenant
        raise CredentialRefused("the token belongs to no tenant of this daemon")

    def named(self, name: str) -> Tenant:
        """The tenant of this name. Raises `CredentialRefused`."""
        for tenant in self._tenants:
            if tenant.name == name:
                return tenant
        raise CredentialRefused(f"this daemon has no tenant '{name}'")

    def of_caller(self, name: str, token: str | None) -> Tenant:
        """The tenant of a caller of the control plane: that of its certificate, `name`, else that of its token, else
        the only one. Raises `CredentialRefused`."""
        if name:
            return self.named(name)
        if token is not None:
            return self._of_token(token)
        if len(self._tenants) > 1:
            raise CredentialRefused(
                "this daemon has several tenants: name one (--tenant NAME), or give the token of one, or a certificate "
                "for one"
            )
        return self._tenants[0]

    def identify(self, uid: int, token: str | None) -> Tenant:
        """The tenant of a process with user id `uid` that sent `token`. Raises `CredentialRefused`, whose text never
        contains a token."""
        if self.is_query_engine(token):
            # The query engine runs as the daemon's own user, which need not be in 'allow_uids'.
            name = (token or "").partition(":")[2]
            for tenant in self._tenants:
                if tenant.name == name:
                    return tenant
        if uid not in self._allowed:
            raise CredentialRefused(
                f"uid {uid} may not use this daemon; add it to 'allow_uids' or to a tenant's 'uids'"
            )
        if token is not None:
            return self._of_token(token)
        for tenant in self._tenants:
            if uid in tenant.uids:
                return tenant
        raise CredentialRefused(f"uid {uid} belongs to no tenant of this daemon, and no token was given")
