"""Handshakes accept the right secret and refuse messages that were changed or recorded; keys of connections."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec.structs import astuple, replace

from tests.rules.next_version import installed
from tokenlake.config import Secret
from tokenlake.errors import ClusterRefused, CredentialRefused, ProtocolRefused, RingRefused
from tokenlake.wire import peer
from tokenlake.wire.frames import decode, encode
from tokenlake_server.peers.connection_keys import KEPT_S, MAX_PER_NODE, KeptKeys, new_keys
from tokenlake_server.peers.handshake import NONCE_BYTES, Acceptor, Dialler, PeerIdentity, acceptor_proof, dialler_proof

SECRET = Secret(b"s" * 16)
A = PeerIdentity("a", 5, (SECRET,))
B = replace(A, node="b", incarnation=6)
NONCE_A, NONCE_B = b"a" * NONCE_BYTES, b"b" * NONCE_BYTES


def half_way(a: PeerIdentity = A, b: PeerIdentity = B, purpose: peer.Purpose = "control") -> tuple[Dialler, Acceptor]:
    """a dials b; b has not answered yet."""
    dialler = Dialler(a, "b", NONCE_A, purpose=purpose)
    return dialler, Acceptor(b, dialler.hello, NONCE_B)


@pytest.mark.parametrize("secret", [SECRET, Secret(b"x" * 64), Secret()])
@pytest.mark.parametrize("purpose", get_args(peer.Purpose))
def test_both_sides_accept_the_same_secret(secret: Secret, purpose: peer.Purpose) -> None:
    dialler, acceptor = half_way(replace(A, secrets=(secret,)), replace(B, secrets=(secret,)), purpose=purpose)
    assert dialler.incarnation is None
    acceptor.check(dialler.answer(acceptor.challenge))
    assert dialler.incarnation == B.incarnation


@pytest.mark.parametrize("other", [Secret(b"t" * 16), Secret()], ids=["another", "none"])
def test_another_secret_is_refused(other: Secret) -> None:
    dialler, acceptor = half_way(replace(A, secrets=(other,)))
    with pytest.raises(CredentialRefused, match="'b' did not prove.*'cluster_secret'"):
        dialler.answer(acceptor.challenge)
    assert dialler.incarnation is None
    with pytest.raises(CredentialRefused, match="'a' did not prove.*'cluster_secret'"):
        acceptor.check(peer.PeerProof(dialler_proof(other, dialler.hello, acceptor.challenge)))


NEW = Secret(b"n" * 16)


@pytest.mark.parametrize(
    ("mine", "theirs"), [((SECRET,), (SECRET, NEW)), ((SECRET, NEW), (NEW, SECRET)), ((NEW,), (NEW, SECRET))]
)
def test_a_secret_is_changed_one_node_at_a_time(mine: tuple[Secret, ...], theirs: tuple[Secret, ...]) -> None:
    """Each side proves itself with its first secret and accepts all of its own."""
    for a, b in ((mine, theirs), (theirs, mine)):
        if a[0] in b and b[0] in a:
            dialler, acceptor = half_way(replace(A, secrets=a), replace(B, secrets=b))
            acceptor.check(dialler.answer(acceptor.challenge))


def test_another_cluster_is_refused_by_both_sides() -> None:
    other = replace(B, cluster="staging")
    dialler, acceptor = half_way(b=other)
    with pytest.raises(ClusterRefused, match="'b' belongs to the cluster 'staging', and 'a' to 'tokenlake'"):
        dialler.answer(acceptor.challenge)
    with pytest.raises(ClusterRefused, match="'a' belongs to the cluster 'tokenlake'"):
        acceptor.check(peer.PeerProof(dialler_proof(SECRET, dialler.hello, acceptor.challenge)))


@pytest.mark.parametrize(
    "change",
    [
        {"cluster": "c"},
        {"node": "c"},
        {"incarnation": 9},
        {"purpose": "bulk"},
        {"nonce": b"c" * 32},
        {"oldest_version": 0},
    ],
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
    "change",
    [{"cluster": "c"}, {"node": "c"}, {"incarnation": 9}, {"version": 1}, {"nonce": b"c" * 32}, {"proof": bytes(32)}],
    ids=str,
)
def test_a_changed_challenge_is_refused(change: dict[str, Any]) -> None:
    dialler, acceptor = half_way()
    with pytest.raises(CredentialRefused):
        dialler.answer(replace(acceptor.challenge, **change))


def test_a_recorded_handshake_is_refused() -> None:
    dialler, acceptor = half_way()
    recorded = dialler.answer(acceptor.challenge)
    again = Acceptor(B, dialler.hello, b"d" * NONCE_BYTES)
    for proof in (recorded, peer.PeerProof(bytes(32))):
        with pytest.raises(CredentialRefused):
            again.check(proof)
    with pytest.raises(CredentialRefused):
        Dialler(A, "b", b"e" * NONCE_BYTES, purpose="control").answer(acceptor.challenge)


def test_the_proof_of_one_side_is_not_that_of_the_other() -> None:
    """A stranger that gets a proof from a node cannot return it to the node as its own."""
    dialler, acceptor = half_way()
    with pytest.raises(CredentialRefused):
        acceptor.check(peer.PeerProof(acceptor.challenge.proof))
    ring = dialler.answer(acceptor.challenge)
    with pytest.raises(CredentialRefused):
        dialler.answer(replace(acceptor.challenge, proof=ring.proof))


def test_two_nodes_of_one_name_refuse_each_other() -> None:
    dialler, acceptor = half_way(replace(A, node="b"))
    with pytest.raises(RingRefused, match="two daemons are called 'b'"):
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


def test_a_dialler_of_a_newer_version_is_accepted() -> None:
    """Its hello has a field that this version does not know; the proofs cover it."""
    dialler = Dialler(A, "b", NONCE_A, purpose="control")
    with installed() as newer:
        dialler.hello = newer["tokenlake.wire.peer"].PeerHello(*astuple(dialler.hello))
    body = encode(dialler.hello)
    acceptor = Acceptor(B, hello_of(body), NONCE_B, body)
    acceptor.check(dialler.answer(acceptor.challenge, encode(acceptor.challenge)))
    changed = body.replace(b"next", b"text")
    assert changed != body
    with pytest.raises(CredentialRefused):
        dialler.answer(Acceptor(B, hello_of(changed), NONCE_B, changed).challenge)


def test_an_acceptor_of_a_newer_version_is_accepted() -> None:
    dialler = Dialler(A, "b", NONCE_A, purpose="control")
    acceptor = Acceptor(B, dialler.hello, NONCE_B)
    with installed() as newer:
        unproven = newer["tokenlake.wire.peer"].PeerChallenge(*astuple(acceptor.challenge))
    proof = acceptor_proof(SECRET, dialler.hello, encode(replace(unproven, proof=bytes(32))))
    acceptor.challenge = replace(unproven, proof=proof)
    body = encode(acceptor.challenge)
    challenge = decode(peer.handshake_decoder, body)
    assert isinstance(challenge, peer.PeerChallenge)
    acceptor.check(dialler.answer(challenge, body))
    with pytest.raises(CredentialRefused):
        dialler.answer(challenge, body.replace(b"next", b"text"))


def hello_of(body: bytes) -> peer.PeerHello:
    hello = decode(peer.handshake_decoder, body)
    assert isinstance(hello, peer.PeerHello)
    return hello


def test_the_keys_of_both_sides_fit() -> None:
    kept = KeptKeys("lake")
    message, mine = new_keys("bulk")
    kept.add("a", 7, message, 0.0)
    granted = kept.take(message.connection, 1.0)
    assert granted is not None
    assert granted.keys == (mine.receiving, mine.sending)
    assert mine.sending != mine.receiving
    assert (granted.hello.node, granted.hello.incarnation, granted.hello.purpose) == ("a", 7, "bulk")


def test_keys_are_used_once() -> None:
    kept = KeptKeys("lake")
    message, _ = new_keys("query")
    kept.add("a", 7, message, 0.0)
    assert kept.take(message.connection, 0.0) is not None
    assert kept.take(message.connection, 0.0) is None
    assert kept.take(bytes(32), 0.0) is None


def test_keys_that_are_too_old_are_dropped() -> None:
    kept = KeptKeys("lake")
    old, _ = new_keys("bulk")
    kept.add("a", 7, old, 0.0)
    assert kept.take(old.connection, KEPT_S + 0.1) is None
    kept.add("a", 7, old, 0.0)
    kept.add("a", 7, new_keys("bulk")[0], KEPT_S + 0.1)
    assert len(kept) == 1


def test_a_node_has_a_bounded_number_of_unused_keys() -> None:
    kept = KeptKeys("lake")
    other, _ = new_keys("bulk")
    kept.add("b", 7, other, 0.0)
    messages = [new_keys("bulk")[0] for _ in range(MAX_PER_NODE + 1)]
    for message in messages:
        kept.add("a", 7, message, 0.0)
    assert len(kept) == MAX_PER_NODE + 1
    assert kept.take(messages[0].connection, 0.0) is None
    assert kept.take(messages[1].connection, 0.0) is not None
    assert kept.take(other.connection, 0.0) is not None


def test_the_keys_of_a_node_that_left_are_forgotten() -> None:
    kept = KeptKeys("lake")
    message, _ = new_keys("bulk")
    kept.add("a", 7, message, 0.0)
    kept.forget("a")
    assert kept.take(message.connection, 0.0) is None
    assert len(kept) == 0
