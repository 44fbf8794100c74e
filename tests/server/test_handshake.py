"""Handshakes: both sides accept the right secret and refuse messages that were changed or recorded."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from tokenlake.config import Secret
from tokenlake.errors import CredentialRefused, ProtocolRefused, RingRefused
from tokenlake.wire import peer
from tokenlake_server.handshake import NONCE_BYTES, Acceptor, Dialler, PeerIdentity, acceptor_proof, dialler_proof

SECRET = Secret(b"s" * 16)
A = PeerIdentity("a", 5, SECRET, "the-lake")
B = replace(A, node="b", incarnation=6)
NONCE_A, NONCE_B = b"a" * NONCE_BYTES, b"b" * NONCE_BYTES


def half_way(a: PeerIdentity = A, b: PeerIdentity = B, purpose: peer.Purpose = "control") -> tuple[Dialler, Acceptor]:
    """a dials b; b has not answered yet."""
    dialler = Dialler(a, "b", NONCE_A, purpose=purpose)
    return dialler, Acceptor(b, dialler.hello, NONCE_B)


@pytest.mark.parametrize("secret", [SECRET, Secret(b"x" * 64), Secret()])
@pytest.mark.parametrize("purpose", get_args(peer.Purpose))
def test_both_sides_accept_the_same_secret(secret: Secret, purpose: peer.Purpose) -> None:
    dialler, acceptor = half_way(replace(A, secret=secret), replace(B, secret=secret), purpose=purpose)
    assert dialler.incarnation is None
    acceptor.check(dialler.answer(acceptor.challenge))
    assert dialler.incarnation == B.incarnation


@pytest.mark.parametrize("other", [Secret(b"t" * 16), Secret()])
def test_another_secret_is_refused_and_the_cluster_is_not_named(other: Secret) -> None:
    dialler, acceptor = half_way(replace(A, secret=other))
    with pytest.raises(CredentialRefused, match="'b' did not prove.*'cluster_secret'") as refused:
        dialler.answer(acceptor.challenge)
    assert "the-lake" not in str(refused.value)
    assert dialler.incarnation is None
    ring = peer.PeerProof(A.cluster, bytes(32))
    proof = dialler_proof(other, dialler.hello, acceptor.challenge, ring)
    with pytest.raises(CredentialRefused, match="'a' did not prove.*'cluster_secret'") as refused:
        acceptor.check(replace(ring, proof=proof))
    assert "the-lake" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [{"node": "c"}, {"incarnation": 9}, {"purpose": "bulk"}, {"nonce": b"c" * 32}, {"oldest_version": 0}],
    ids=str,
)
def test_a_changed_hello_is_refused(change: dict[str, Any]) -> None:
    """Changes such as a recorded handshake against a fresh nonce, or the proof of a control connection on a bulk
    one."""
    dialler, acceptor = half_way()
    changed = Acceptor(B, replace(dialler.hello, **change), NONCE_B)
    with pytest.raises(CredentialRefused):
        dialler.answer(changed.challenge)
    with pytest.raises(CredentialRefused):
        changed.check(dialler.answer(acceptor.challenge))


@pytest.mark.parametrize(
    "change", [{"node": "c"}, {"incarnation": 9}, {"version": 2}, {"nonce": b"c" * 32}, {"proof": bytes(32)}], ids=str
)
def test_a_changed_challenge_is_refused(change: dict[str, Any]) -> None:
    dialler, acceptor = half_way()
    with pytest.raises(CredentialRefused):
        dialler.answer(replace(acceptor.challenge, **change))


@pytest.mark.parametrize("change", [{"cluster": "another-lake"}, {"proof": bytes(32)}], ids=str)
def test_a_changed_proof_is_refused(change: dict[str, Any]) -> None:
    dialler, acceptor = half_way()
    proof = dialler.answer(acceptor.challenge)
    with pytest.raises(CredentialRefused):
        acceptor.check(replace(proof, **change))


def test_a_recorded_handshake_is_refused() -> None:
    dialler, acceptor = half_way()
    recorded = dialler.answer(acceptor.challenge)
    again = Acceptor(B, dialler.hello, b"d" * NONCE_BYTES)
    with pytest.raises(CredentialRefused):
        again.check(recorded)
    with pytest.raises(CredentialRefused):
        Dialler(A, "b", b"e" * NONCE_BYTES, purpose="control").answer(acceptor.challenge)


def test_the_proof_of_one_side_is_not_that_of_the_other() -> None:
    """A stranger that gets a proof from a node cannot return it to the node as its own."""
    dialler, acceptor = half_way()
    with pytest.raises(CredentialRefused):
        acceptor.check(peer.PeerProof(A.cluster, acceptor.challenge.proof))
    ring = dialler.answer(acceptor.challenge)
    with pytest.raises(CredentialRefused):
        dialler.answer(replace(acceptor.challenge, proof=ring.proof))


def test_clusters_are_compared_after_the_proof() -> None:
    for changes, reason in (
        ({"cluster": "another"}, "'a' belongs to the cluster 'another', and 'b' to 'the-lake'"),
        ({"node": "b"}, "two daemons are called 'b'"),
    ):
        dialler, acceptor = half_way(replace(A, **changes))
        with pytest.raises(RingRefused, match=reason):
            acceptor.check(dialler.answer(acceptor.challenge))


def test_another_node_at_the_address_and_versions() -> None:
    acceptor = Acceptor(B, Dialler(A, "c", NONCE_A, purpose="control").hello, NONCE_B)
    with pytest.raises(RingRefused, match="address of 'c' calls itself 'b'"):
        Dialler(A, "c", NONCE_A, purpose="control").answer(acceptor.challenge)
    dialler, acceptor = half_way()
    strange = replace(acceptor.challenge, version=9)
    strange = replace(strange, proof=acceptor_proof(SECRET, dialler.hello, strange))
    with pytest.raises(ProtocolRefused, match="version 9"):
        dialler.answer(strange)
    with pytest.raises(ProtocolRefused, match="versions 8 to 9"):
        Acceptor(B, replace(dialler.hello, oldest_version=8, newest_version=9), NONCE_B)


def test_no_representation_shows_the_secret() -> None:
    assert "ssss" not in f"{A} {A!r} {SECRET} {SECRET!r}"
