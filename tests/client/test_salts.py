"""The salt of an engine and of a request: one for each pair."""

from __future__ import annotations

from tokenlake.hints import Hints
from tokenlake_client.salts import account_of, joined_salt


def test_pairs_have_salts_of_their_own() -> None:
    """A client that sends the salt of another engine, or a part of it, gets a salt of its own."""
    pairs = [(ours, theirs) for ours in (None, "", "a", "1:a", "ab") for theirs in (None, "", "a", "b", "1:a", "2:ab")]
    assert len({joined_salt(*pair) for pair in pairs}) == len(pairs)


def test_an_engine_alone_has_its_own() -> None:
    """Requests without a salt share with the other engines of the same salt, and of other integrations."""
    assert joined_salt("a", None) == "a"
    assert joined_salt(None, None) is None


def test_the_account_of_a_salt() -> None:
    """A name for each salt, which hints may have; the salt cannot be read from it."""
    names = {account_of(salt) for salt in ("a", "b", "user-7", "\udcff", "x" * 1000)}
    assert len(names) == 5
    assert all(Hints(account=name).account == name != "" for name in names)
    assert account_of(None) == account_of("") == ""
