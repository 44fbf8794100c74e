"""How long the calls of a pool may block."""

from __future__ import annotations

import msgspec

from tokenlake_client.arguments import seconds


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """The deadlines of a pool, in seconds: an argument of `Pool.connect`. A call that is given a `deadline_s` uses that
    one instead.

    A call that misses its deadline raises `DeadlinePassed`. Further calls then raise it at once until the daemon sends
    something (`tokenlake.wire.liveness`), so that a frozen daemon costs an engine one deadline and not one per call.
    Longer deadlines are needed where the daemon shares its processors with other programs, and may be off the processor
    for longer than the defaults. Raises `ValueError` for a value that is no number of seconds.
    """

    connect_s: float = 5.0
    """Seconds that opening a connection may take, until the daemon has answered the handshake."""
    dial_s: float = 1.0
    """Seconds that dialling the daemon may take."""
    call_s: float = 0.250
    """Seconds for calls that the daemon answers from its own memory: `attach`, `nodes`, heartbeats, and mapping a
    memory region that this process reads."""
    match_s: float = 0.020
    """Seconds for `match` and `begin_match`, beside 20 us for each key: how long the daemon may wait for the answers of
    other nodes."""
    fetch_s: float = 0.0
    """Seconds for `Lease.fetch` and `Lease.copy_into`, until segments of other nodes have been transferred to this one.
    0: the daemon predicts the deadline from the rate of earlier transfers, and the client waits as long as the daemon
    is alive."""
    store_s: float = 2.0
    """Seconds for calls that reserve or commit slots, and for mapping a memory region that this process writes. The
    deadline is long, because engines store in the background: a wait delays no request, and a store that fails loses
    computed cache."""
    grace_s: float = 0.030
    """Seconds that the client waits beyond the deadline of a match, fetch, view or query. The daemon or the query
    engine answers these calls at the deadline, with the results that it has by then, and the answer takes this time to
    arrive."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            seconds(name, getattr(self, name))


DEFAULT_DEADLINES = Deadlines()
