"""The salt of an engine and of a request: one for each pair."""

from __future__ import annotations

from tokenlake_client.salts import joined_salt


def test_pairs_have_salts_of_their_own() -> None:
    """A client that sends the salt of another engine, or a part of it, gets a salt of its own."""
    pairs = [(ours, theirs) for ours in (None, "", "a", "1:a", "ab") for theirs in (None, "", "a", "b", "1:a", "2:ab")]
    assert len({joined_salt(*pair) for pair in pairs}) == len(pairs)


def test_an_engine_alone_has_its_own() -> None:
    """Requests without a salt share with the other engines of the same salt, and of other integrations."""
    assert joined_salt("a", None) == "a"
    assert joined_salt(None, None) is None
