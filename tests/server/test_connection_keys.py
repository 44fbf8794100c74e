"""Keys of connections: they are used once, in time, and a node cannot fill the memory with them."""

from __future__ import annotations

from tokenlake_server.peers.connection_keys import KEPT_S, MAX_PER_NODE, KeptKeys, new_keys


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
