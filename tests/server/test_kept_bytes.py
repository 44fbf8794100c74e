"""Bytes that connections make the daemon keep: their limits by connection and by tenant."""

from __future__ import annotations

import pytest

from tokenlake.errors import LimitReached
from tokenlake_server.engines.kept_bytes import MAX_OF_CONNECTION, Account, KeptBytes

MIB = 1 << 20


def test_a_tenant_does_not_take_the_part_of_another() -> None:
    kept = KeptBytes(2, 4 * MIB)
    red = [Account(kept, "red") for _ in range(2)]
    red[0].charge(MIB)
    red[1].charge(MIB)
    with pytest.raises(LimitReached, match="tenant 'red'.*'tenant_bytes' is 2097152"):
        red[1].charge(1)
    blue = Account(kept, "blue")
    blue.charge(2 * MIB)
    assert (kept.of("red"), kept.of("blue")) == (2 * MIB, 2 * MIB), "what was refused is not counted"
    red[0].charge(-MIB)
    red[1].charge(MIB)
    for account in (*red, blue):
        account.close()
        account.close()
    assert (kept.of("red"), kept.of("blue")) == (0, 0)


def test_a_connection_has_a_limit() -> None:
    kept = KeptBytes(1, 4 * MAX_OF_CONNECTION)
    account = Account(kept, "red")
    account.charge(MAX_OF_CONNECTION)
    with pytest.raises(LimitReached, match="'connection_bytes'"):
        account.charge(1)
    Account(kept, "red").charge(1)
