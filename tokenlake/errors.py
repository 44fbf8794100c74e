"""Every error that TokenLake raises to its caller, in one tree.

::

    TokenLakeError
    +-- Unreachable             the daemon or the peer does not answer, or the connection broke
    |   +-- DeadlinePassed      it is connected, but did not answer in time
    |   +-- ListenerUntrusted   another user listens at the daemon's socket, or could
    +-- Refused                 the other side refused the request
    |   +-- LayoutRefused       the layout is unknown, unsupported or another one
    |   +-- CredentialRefused   no tenant has this uid or token, or a peer has another secret or no valid certificate
    |   +-- ClusterRefused      a peer belongs to another cluster
    |   +-- ProtocolRefused     other protocol version, failed probe hash, malformed or oversized frame
    |   +-- LimitReached        a bound of the daemon or of the session; the message names it
    |   +-- RingRefused         a node of another cluster, or no member of this one
    |   +-- MembershipRefused   the members cannot be read or changed so; the message names the reason
    +-- ConfigurationError      a setting is unknown or invalid; names field, value and what was expected

A miss is not an error: the reply has a `Code` (`tokenlake.wire`) for each key.
"""

from __future__ import annotations

__all__ = [
    "ClusterRefused",
    "ConfigurationError",
    "CredentialRefused",
    "DeadlinePassed",
    "LayoutRefused",
    "LimitReached",
    "ListenerUntrusted",
    "MembershipRefused",
    "ProtocolRefused",
    "Refused",
    "RingRefused",
    "TokenLakeError",
    "Unreachable",
]


class TokenLakeError(Exception):
    """Root of the tree."""


class Unreachable(TokenLakeError):
    """No process answers at the address; the message names it."""


class DeadlinePassed(Unreachable):
    """No answer within the deadline; the message names the call and the deadline."""


class ListenerUntrusted(Unreachable):
    """Another user listens at the path of the daemon's socket, or could; nothing was sent. The message names the user
    and the file."""


class Refused(TokenLakeError):
    """The other side refused the request; the message is its reason."""


class LayoutRefused(Refused):
    """The layout, or one field of it, cannot be served; the message names it."""


class CredentialRefused(Refused):
    """The caller's uid or token maps to no tenant, or a daemon did not prove that it knows the cluster secret, or its
    certificate is not valid or names another node."""


class ClusterRefused(Refused):
    """Two nodes have different values of the setting 'cluster'."""


class ProtocolRefused(Refused):
    """The two sides do not speak the same protocol, or a frame broke its rules."""


class LimitReached(Refused):
    """A configured bound was reached; the message names the bound and its value."""


class RingRefused(Refused):
    """Two nodes belong to different clusters, or one of them is not a member of the cluster of the other."""


class MembershipRefused(Refused):
    """The stored members are not what a daemon wrote, another daemon has this node's name, or the members of this
    cluster cannot be changed in this way; the message names which."""


class ConfigurationError(TokenLakeError):
    """A setting is unknown or invalid."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"setting '{field}' is {value!r}; expected {expected}")
        self.field = field
        self.value = value
        self.expected = expected
