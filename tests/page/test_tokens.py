"""Tokens of the page: what they allow, when they end, and what is no token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import CredentialRefused
from tokenlake_server.page.tokens import MAX_TOKEN, PageTokens


class Clock:
    """The time of a test."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_token_names_its_tenant_and_ends() -> None:
    clock = Clock()
    tokens = PageTokens(clock)
    token = tokens.grant("blue", 60.0)
    clock.now += 20.0
    assert tokens.check(token) == ("blue", 40.0)
    clock.now += 40.0
    with pytest.raises(CredentialRefused, match="has expired"):
        tokens.check(token)
    assert tokens.check(tokens.grant("", 60.0)).tenant == ""


def test_a_token_of_another_start_is_refused() -> None:
    with pytest.raises(CredentialRefused, match="did not make"):
        PageTokens().check(PageTokens().grant("", 60.0))


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_changed_token_is_refused(place: int, change: int) -> None:
    tokens = PageTokens()
    token = bytearray(tokens.grant("blue", 60.0).encode())
    token[place % (len(token) - 1)] ^= change
    with pytest.raises(CredentialRefused, match="did not make"):
        tokens.check(token.decode("latin-1"))


@given(st.one_of(st.text(max_size=100), st.sampled_from(["A" * MAX_TOKEN, "A" * (1 << 20), "=" * 50, "é"])))
def test_a_text_is_no_token(text: str) -> None:
    with pytest.raises(CredentialRefused, match="did not make") as refused:
        PageTokens().check(text)
    assert len(text) < 10 or text not in str(refused.value)
