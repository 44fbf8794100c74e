"""Callers: the role and the tenant that a connection proves.

============  ==========================================================================================
connection    role
============  ==========================================================================================
Unix socket   admin. The kernel lets only the daemon's user and root connect, because its mode is 0600
TLS           that of the certificate's URI, `spiffe://CLUSTER/tokenlake/ROLE/[TENANT/]NAME`
============  ==========================================================================================

Every other connection has no role, and a method without a role is open to none.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cryptography import x509

from tokenlake.config import Tenant
from tokenlake.errors import CredentialRefused
from tokenlake_proto.v1 import role_pb2
from tokenlake_server.engines.tenants import Tenants
from tokenlake_server.peers.certificates import PeerCertificate, certificate_of, require_valid
from tokenlake_server.peers.identity import role_of, role_uri

TOKEN_KEY = "tokenlake-credential"
"""Name of the metadata with the token of a tenant."""
MAX_KNOWN = 256
"""Certificates whose facts are kept; reading one takes 50 us."""
_ROLES = {"reader": role_pb2.ROLE_READER, "scheduler": role_pb2.ROLE_SCHEDULER, "admin": role_pb2.ROLE_ADMIN}
_LOCAL = "unix:"
CONTROL_SOCKET = "control socket"
"""The name of a caller at the Unix socket."""


class Caller(NamedTuple):
    """One caller of a method."""

    role: role_pb2.Role.ValueType
    name: str
    """For logs: the name in the certificate, or `control socket`."""
    tenant: str
    """The tenant that the certificate names; empty for none."""
    token: str | None
    """The token of a tenant, from the metadata of the call."""
    tenants: Tenants

    @property
    def admin(self) -> bool:
        """True for the role that may see all tenants."""
        return self.role >= role_pb2.ROLE_ADMIN

    @property
    def account(self) -> str:
        """The name of the tenant to which the caller's calls are charged; empty for one that names none."""
        try:
            return self.own().name
        except CredentialRefused:
            return ""

    def own(self) -> Tenant:
        """The tenant of the caller. Raises `CredentialRefused`."""
        return self.tenants.of_caller(self.tenant, self.token)

    def target(self, name: str) -> Tenant:
        """The tenant that an admin names, or the caller's own. Raises `CredentialRefused`."""
        if not name:
            return self.own()
        if not self.admin and name != self.own().name:
            raise CredentialRefused(f"only an admin may name another tenant than its own, '{name}'")
        return self.tenants.named(name)


class Callers:
    """Identifies callers. Used in the admin thread only."""

    def __init__(self, cluster: str, tenants: Tenants) -> None:
        self._cluster = cluster
        self._tenants = tenants
        self._known: OrderedDict[bytes, PeerCertificate] = OrderedDict()

    def identify(
        self, peer: str, proven: Mapping[str, Iterable[bytes]], metadata: Iterable[tuple[str, str | bytes]]
    ) -> Caller:
        """The caller of a method. `peer`, `proven`: gRPC's address and authentication context of the connection.
        Raises `CredentialRefused` for a connection without a role."""
        token = next((value for key, value in metadata if key == TOKEN_KEY and isinstance(value, str)), None)
        pem = next(iter(proven.get("x509_pem_cert", ())), b"")
        if not pem:
            if not peer.startswith(_LOCAL):
                raise CredentialRefused("this connection proves no role")
            return Caller(role_pb2.ROLE_ADMIN, CONTROL_SOCKET, "", token, self._tenants)
        certificate = self._read(pem)
        found = role_of(self._cluster, certificate.uri)
        if found is None:
            expected = f"{role_uri(self._cluster, 'ROLE', '[TENANT/]NAME')} with the role reader, scheduler or admin"
            raise CredentialRefused(f"the certificate is for {certificate.uri or 'no single URI'}; expected {expected}")
        require_valid("its certificate", certificate, datetime.datetime.now(datetime.UTC))
        role, tenant, name = found
        return Caller(_ROLES[role], name, tenant, token, self._tenants)

    def _read(self, pem: bytes) -> PeerCertificate:
        known = self._known.get(pem)
        if known is None:
            known = self._known[pem] = certificate_of(x509.load_pem_x509_certificate(pem))
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return known
