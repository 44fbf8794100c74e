"""The handshake of a connection between daemons: each side proves that it knows the cluster secret.

::

    dialler                                        acceptor
       | PeerHello: name, incarnation, nonce ------>|
       |<------ PeerChallenge: the same, and a proof|
       | PeerProof: cluster, and a proof ---------->|
       |<------ PeerWelcome, or PeerRefused         |

A proof is blake2b, keyed with the secret, over all earlier messages of the handshake and the name of the proving side.
It covers both nonces, so that a recorded handshake is not accepted again, and the purpose of the connection, so that
the proof of a control connection does not open a bulk connection. The acceptor proves itself first. The dialler
therefore names its cluster only to a node that knows the secret, and the acceptor names its own only to such a node.

This module does no I/O; nonces are passed in. The frames after the handshake are neither encrypted nor authenticated.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from tokenlake.config import Secret
from tokenlake.errors import CredentialRefused, ProtocolRefused, RingRefused
from tokenlake.wire import agree, peer
from tokenlake.wire.version import OLDEST_VERSION, PROTOCOL_VERSION

__all__ = ["DEFAULT_CLUSTER", "NONCE_BYTES", "Acceptor", "Dialler", "PeerIdentity", "acceptor_proof", "dialler_proof"]

DEFAULT_CLUSTER = "tokenlake"
"""Name of a cluster whose nodes were given none."""
NONCE_BYTES = 32
PROOF_BYTES = 32

_NO_SECRET = hashlib.blake2b(b"tokenlake: no cluster secret", digest_size=32).digest()
"""The key for proofs of a daemon without `cluster_secret`. It is public: such a pool has one tenant, on one machine."""
_CHANGE = "set the same 'cluster_secret' (configuration file, or TOKENLAKE_CLUSTER_SECRET) on all nodes"


class PeerIdentity(msgspec.Struct, frozen=True):
    """The identity of this node in handshakes between daemons, and the secret that proves it."""

    node: str
    incarnation: int
    secret: Secret = Secret()
    """The setting `cluster_secret`; empty where there is none."""
    cluster: str = DEFAULT_CLUSTER
    """The name of the cluster: nodes of clusters with different names refuse each other."""


class Dialler:
    """The side of a handshake between daemons that opened the connection to `node`."""

    def __init__(self, identity: PeerIdentity, node: str, nonce: bytes, purpose: peer.Purpose) -> None:
        """`nonce`: `NONCE_BYTES` random bytes, fresh for each handshake."""
        self._identity = identity
        self._node = node
        own = (identity.node, identity.incarnation)
        self.hello = peer.PeerHello(OLDEST_VERSION, PROTOCOL_VERSION, *own, purpose, nonce)
        """The first message."""
        self.incarnation: int | None = None
        """The incarnation of the accepting daemon; None until it has proven itself."""

    def answer(self, challenge: peer.PeerChallenge) -> peer.PeerProof:
        """Check the acceptor's proof and return the reply. Raises `CredentialRefused`, `RingRefused` or
        `ProtocolRefused`; the fields of `challenge` are not to be trusted then."""
        proof = acceptor_proof(self._identity.secret, self.hello, challenge)
        if not hmac.compare_digest(proof, challenge.proof):
            raise _not_proven(self._node, self._identity)
        if challenge.node != self._node:
            raise RingRefused(f"the node at the address of '{self._node}' calls itself '{challenge.node}'")
        if not OLDEST_VERSION <= challenge.version <= PROTOCOL_VERSION:
            raise ProtocolRefused(f"node '{self._node}' chose version {challenge.version}, which was not offered")
        self.incarnation = challenge.incarnation
        unproven = peer.PeerProof(self._identity.cluster, bytes(PROOF_BYTES))
        proof = dialler_proof(self._identity.secret, self.hello, challenge, unproven)
        return msgspec.structs.replace(unproven, proof=proof)


class Acceptor:
    """The side of a handshake between daemons that accepted the connection."""

    def __init__(self, identity: PeerIdentity, hello: peer.PeerHello, nonce: bytes) -> None:
        """`nonce`: `NONCE_BYTES` random bytes, fresh for each handshake. Raises `ProtocolRefused` when the two nodes
        have no protocol version in common."""
        self._identity = identity
        self.hello = hello
        """The dialler's first message (`PeerHello`), to be trusted only after `check`."""
        version = agree(hello.oldest_version, hello.newest_version)
        unproven = peer.PeerChallenge(version, identity.node, identity.incarnation, nonce, bytes(PROOF_BYTES))
        proof = acceptor_proof(identity.secret, hello, unproven)
        self.challenge = msgspec.structs.replace(unproven, proof=proof)
        """The acceptor's reply to the dialler's hello, with the proof that it knows the secret."""

    def check(self, message: peer.PeerProof) -> None:
        """Check the dialler's proof, then its cluster. Raises `CredentialRefused`, whose text does not name it,
        or `RingRefused`, whose text names the difference. The caller checks that the dialler is a member."""
        proof = dialler_proof(self._identity.secret, self.hello, self.challenge, message)
        if not hmac.compare_digest(proof, message.proof):
            raise _not_proven(self.hello.node, self._identity)
        _check_cluster(self._identity, self.hello.node, message)


def acceptor_proof(secret: bytes, hello: peer.PeerHello, challenge: peer.PeerChallenge) -> bytes:
    """The acceptor's proof, to be sent as the `proof` of `challenge`: blake2b, keyed with the secret, over the messages
    of the handshake."""
    return _keyed(secret, b"acceptor", hello, msgspec.structs.replace(challenge, proof=bytes(PROOF_BYTES)))


def dialler_proof(secret: bytes, hello: peer.PeerHello, challenge: peer.PeerChallenge, proof: peer.PeerProof) -> bytes:
    """The dialler's proof, to be sent in the field `proof` of `proof`: blake2b, keyed with the secret, over the
    messages of the handshake."""
    return _keyed(secret, b"dialler", hello, challenge, msgspec.structs.replace(proof, proof=bytes(PROOF_BYTES)))


def _keyed(secret: bytes, side: bytes, *messages: msgspec.Struct) -> bytes:
    # A key is always used: blake2b with an empty key would be a plain hash, which proves nothing.
    text = msgspec.msgpack.encode((side, *messages))
    return hashlib.blake2b(text, digest_size=PROOF_BYTES, key=secret or _NO_SECRET, person=b"tokenlake peers").digest()


def _not_proven(node: str, identity: PeerIdentity) -> CredentialRefused:
    return CredentialRefused(
        f"node '{node}' did not prove to '{identity.node}' that it knows the cluster secret; {_CHANGE}"
    )


def _check_cluster(identity: PeerIdentity, node: str, proof: peer.PeerProof) -> None:
    if node == identity.node:
        raise RingRefused(f"two daemons are called '{identity.node}'; every node needs a name of its own")
    if proof.cluster != identity.cluster:
        raise RingRefused(
            f"node '{node}' belongs to the cluster '{proof.cluster}', and '{identity.node}' to '{identity.cluster}'"
        )
