"""The handshake of a connection between daemons: each side proves that it knows the cluster secret.

::

    dialler                                        acceptor
       | PeerHello: name, incarnation, nonce ------>|
       |<------ PeerChallenge: the same, and a proof|
       | PeerProof: a proof ----------------------->|
       |<------ PeerWelcome, or PeerRefused         |

A proof is blake2b, keyed with the secret, over all earlier messages of the handshake and the name of the proving side.
It covers both nonces, so that a recorded handshake is not accepted again, and the purpose of the connection, so that
the proof of a control connection does not open a bulk connection. The acceptor proves itself first. Messages of the
other side are hashed as they were received, with fields that only a newer version knows.

The handshake does no I/O; nonces are passed in. The frames behind it are neither encrypted nor authenticated.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from tokenlake.config import Secret
from tokenlake.errors import ClusterRefused, CredentialRefused, ProtocolRefused, RingRefused
from tokenlake.wire import agree, peer
from tokenlake.wire.frames import decode, encode
from tokenlake.wire.version import OLDEST_VERSION, PROTOCOL_VERSION

NONCE_BYTES = 32
PROOF_BYTES = 32

_NO_SECRET = hashlib.blake2b(b"tokenlake: no cluster secret", digest_size=32).digest()
"""The key for proofs of a daemon without `cluster_secret`. It is public: such a pool has one tenant, on one machine."""
_CHANGE = "set the same 'cluster_secret' (configuration file, or TOKENLAKE_CLUSTER_SECRET) on all nodes"


class PeerIdentity(msgspec.Struct, frozen=True):
    """The identity of this node in handshakes between daemons, and the secret that proves it."""

    node: str
    incarnation: int
    secrets: tuple[Secret, ...] = ()
    """The setting `cluster_secret`: the first one proves this node, and each proves another one. Empty where there is
    none, or where certificates prove the nodes."""
    cluster: str = "tokenlake"
    """The setting `cluster`."""
    bulk: tuple[str, ...] = ()
    """The setting `bulk_listen`."""
    control: str = ""
    """The address at which other machines reach the control plane of this node; empty if they cannot."""
    location: str = ""
    """The setting `location`, as text."""

    @property
    def secret(self) -> Secret:
        """The secret by which this node proves itself; empty where there is none."""
        return self.secrets[0] if self.secrets else Secret()

    def accepts(self, proof: bytes, expected: Callable[[Secret], bytes]) -> bool:
        """True if `proof` is what `expected` returns for a secret of this node."""
        return any(hmac.compare_digest(expected(secret), proof) for secret in self.secrets or (Secret(),))


class Dialler:
    """The side of a handshake between daemons that opened the connection to `node`."""

    def __init__(self, identity: PeerIdentity, node: str, nonce: bytes, purpose: peer.Purpose) -> None:
        """`nonce`: `NONCE_BYTES` random bytes, fresh for each handshake."""
        self._identity = identity
        self._node = node
        own = (identity.cluster, identity.node, identity.incarnation)
        self.hello = peer.PeerHello(
            OLDEST_VERSION, PROTOCOL_VERSION, *own, purpose, nonce, identity.bulk, identity.control, identity.location
        )
        """The first message."""
        self.incarnation: int | None = None
        """The incarnation of the accepting daemon; None until it has proven itself."""
        self.bulk: tuple[str, ...] = ()
        """Further addresses at which the accepting daemon accepts bulk connections, once it has proven itself."""
        self.control = ""
        """The address of the control plane of the accepting daemon, set once that daemon has proven its identity."""
        self.location = ""
        """The location of the accepting daemon, once it has proven itself."""

    def answer(self, challenge: peer.PeerChallenge, body: bytes | None = None) -> peer.PeerProof:
        """Check the acceptor's proof and return the reply. `body`: the challenge as it was received; None: it has no
        further fields. Raises `CredentialRefused`, `RingRefused` or `ProtocolRefused`; the fields of `challenge` are
        not to be trusted then."""
        received = body or challenge
        if not self._identity.accepts(challenge.proof, lambda secret: acceptor_proof(secret, self.hello, received)):
            raise _not_proven(self._node, self._identity)
        _check_cluster(self._identity, self._node, challenge.cluster)
        if challenge.node != self._node:
            raise RingRefused(f"the node at the address of '{self._node}' calls itself '{challenge.node}'")
        if not OLDEST_VERSION <= challenge.version <= PROTOCOL_VERSION:
            raise ProtocolRefused(f"node '{self._node}' chose version {challenge.version}, which was not offered")
        self.incarnation, self.bulk, self.control = challenge.incarnation, challenge.bulk, challenge.control
        self.location = challenge.location
        return peer.PeerProof(dialler_proof(self._identity.secret, self.hello, received))


class Acceptor:
    """The side of a handshake between daemons that accepted the connection."""

    def __init__(self, identity: PeerIdentity, hello: peer.PeerHello, nonce: bytes, body: bytes | None = None) -> None:
        """`nonce`: `NONCE_BYTES` random bytes, fresh for each handshake. `body`: the hello as it was received; None: it
        has no further fields. Raises `ProtocolRefused` when the two nodes have no protocol version in common."""
        self._identity = identity
        self._received = body or hello
        self.hello = hello
        """The dialler's first message (`PeerHello`), to be trusted only after `check`."""
        version = agree(hello.oldest_version, hello.newest_version)
        own = (identity.cluster, identity.node, identity.incarnation)
        told = identity.bulk, identity.control, identity.location
        unproven = peer.PeerChallenge(version, *own, nonce, bytes(PROOF_BYTES), *told)
        proof = acceptor_proof(identity.secret, self._received, unproven)
        self.challenge = msgspec.structs.replace(unproven, proof=proof)
        """The acceptor's reply to the dialler's hello, with the proof that it knows the secret."""

    def check(self, message: peer.PeerProof) -> None:
        """Check the dialler's proof, then its cluster and its name. Raises `CredentialRefused`, `ClusterRefused` or
        `RingRefused`. The caller checks that the dialler is a member."""
        if not self._identity.accepts(
            message.proof, lambda secret: dialler_proof(secret, self._received, self.challenge)
        ):
            raise _not_proven(self.hello.node, self._identity)
        _check_cluster(self._identity, self.hello.node, self.hello.cluster)
        if self.hello.node == self._identity.node:
            raise RingRefused(f"two daemons are called '{self.hello.node}'; every node needs a name of its own")


def acceptor_proof(secret: bytes, hello: peer.PeerHello | bytes, challenge: peer.PeerChallenge | bytes) -> bytes:
    """The acceptor's proof, to be sent as the `proof` of `challenge`: blake2b, keyed with the secret, over the messages
    of the handshake. Messages that were received are given as bytes."""
    return _keyed(secret, b"acceptor", hello, _unproven(challenge))


def dialler_proof(secret: bytes, hello: peer.PeerHello | bytes, challenge: peer.PeerChallenge | bytes) -> bytes:
    """The dialler's proof, to be sent as `PeerProof`: blake2b, keyed with the secret, over the messages of the
    handshake. Messages that were received are given as bytes."""
    return _keyed(secret, b"dialler", hello, challenge)


def _unproven(challenge: peer.PeerChallenge | bytes) -> bytes:
    """The frame of the challenge with zeros in place of the proof."""
    body = challenge if isinstance(challenge, bytes) else encode(challenge)
    # Fields behind the proof are those of newer versions, which either side may have.
    known = peer.PeerChallenge.__struct_fields__.index("proof") + 1
    read = msgspec.structs.astuple(decode(peer.handshake_decoder, body))
    end = len(msgspec.msgpack.encode((peer.PeerChallenge.__struct_config__.tag, *read[:known])))
    return body[: end - PROOF_BYTES] + bytes(PROOF_BYTES) + body[end:]


def _keyed(secret: bytes, side: bytes, *messages: msgspec.Struct | bytes) -> bytes:
    # A key is always used: blake2b with an empty key would be a plain hash, which proves nothing.
    text = msgspec.msgpack.encode(
        (side, *(msgspec.Raw(each) if isinstance(each, bytes) else each for each in messages))
    )
    return hashlib.blake2b(text, digest_size=PROOF_BYTES, key=secret or _NO_SECRET, person=b"tokenlake peers").digest()


def _not_proven(node: str, identity: PeerIdentity) -> CredentialRefused:
    return CredentialRefused(
        f"node '{node}' did not prove to '{identity.node}' that it knows the cluster secret; {_CHANGE}"
    )


def _check_cluster(identity: PeerIdentity, node: str, cluster: str) -> None:
    if cluster != identity.cluster:
        raise ClusterRefused(
            f"node '{node}' belongs to the cluster '{cluster}', and '{identity.node}' to '{identity.cluster}'; nodes "
            "of one cluster have the same setting 'cluster'"
        )


@dataclass
class Pending:
    """A connection whose other side has not yet proven its identity."""

    timer: asyncio.TimerHandle
    source: str
    """The source address of an accepted connection; empty where this daemon dialled."""
    dialled: str | None
    """The node that this daemon dialled; None where the other daemon dialled."""
    ended: asyncio.Future[None] | None
    """The end of the attempt, where this daemon dialled: the future is done when the attempt has succeeded or
    failed."""
    side: Dialler | Acceptor | None
    """The part of the handshake that this daemon plays, dialler or acceptor; None until the other daemon's hello."""
    certified: str | None = None
    """The node that the other side's certificate names; None without TLS."""
    purpose: Literal["control", "join"] = "control"
    """The purpose, where this daemon dialled."""
    opening: bytes = b""
    """The id of the connection while it waits for its keys; empty otherwise."""

    @property
    def node(self) -> str:
        """The name of the other node: the one that was dialled, or the unproven name that the dialler gave; empty
        before its hello."""
        if self.certified is not None and self.dialled is None:
            return self.certified
        return self.side.hello.node if isinstance(self.side, Acceptor) else self.dialled or ""
