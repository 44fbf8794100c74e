"""The table of promises: for each subject and fault a promise and the scenario that checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from tests.robustness.live import LIMIT_S
from tests.robustness.matrix import on_daemon, on_engine, on_peer
from tests.robustness.matrix.measure import Outcome
from tests.robustness.matrix.proxy import Cut, Drop

ANY = 1 << 30


@dataclass(frozen=True)
class Cell:
    """One scenario. `timeouts`: for each engine by name, how many calls may wait for their whole deadline; 0 for an
    engine without a name here."""

    subject: str
    fault: str
    promise: str
    scenario: Callable[[int], Outcome]
    timeouts: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The argument of the command."""
        return f"{self.subject}/{self.fault}"

    @property
    def seed(self) -> int:
        """Unless another is given."""
        return 1 + CELLS.index(self)

    def check(self, outcome: Outcome) -> None:
        """Raises AssertionError for a promise that was not kept."""
        assert outcome.compared > 0
        assert outcome.wrong == 0, "wrong bytes"
        assert outcome.lost <= outcome.may_lose, "segments lost"
        assert outcome.longest_s < LIMIT_S, "a call that hung"
        late = {name: count for name, count in outcome.timeouts.items() if count > self.timeouts.get(name, 0)}
        assert not late, f"calls that waited for their whole deadline: {late}"


AT_ONCE = "calls fail at once, none waits for its deadline"
RESUMED = "one call fails at once; the session goes on, leased segments stay leased and readable; nothing is lost"
KEPT = "arrays and leases go on at the next daemon; nothing is lost"
UNNOTICED = "other engines notice nothing"

CELLS = (
    Cell(
        "daemon",
        "kill",
        f"{AT_ONCE}; arrays stay readable; at most the segments that only it held are lost; its engine reconnects by "
        "itself",
        on_daemon.killed,
    ),
    Cell(
        "daemon",
        "kill-kept-memory",
        f"{AT_ONCE}; {KEPT}",
        partial(on_daemon.restarted_with_memory, killed=True),
    ),
    Cell(
        "daemon",
        "end-kept-memory",
        f"{AT_ONCE}; {KEPT}",
        partial(on_daemon.restarted_with_memory, killed=False),
    ),
    Cell(
        "daemon",
        "stop",
        "its engine waits for one deadline, then calls fail at once; engines elsewhere see misses; nothing is lost",
        on_daemon.stopped,
        {"engine of node0": 1},
    ),
    Cell(
        "daemon",
        "slow",
        "each call ends at its deadline; late answers grant nothing; the daemon's other engines notice nothing",
        on_daemon.slow,
        {"engine behind the trickle": ANY},
    ),
    Cell("daemon", "half-header", RESUMED, partial(on_daemon.cut, fault=Cut("down", "header"))),
    Cell("daemon", "half-payload", RESUMED, partial(on_daemon.cut, fault=Cut("down", "body"))),
    Cell(
        "daemon",
        "full",
        "stores are refused at once with NO_SLOT; leased segments stay and are read; released slots are reused",
        on_daemon.full,
    ),
    Cell(
        "daemon",
        "flip-arena",
        "an engine that verifies reads no flipped segment; after its report other engines read none either; only the "
        "flipped segments are lost, until recomputed",
        on_daemon.flipped_in_arena,
    ),
    Cell(
        "peer",
        "kill",
        f"misses: {AT_ONCE}; at most the segments that only it held are lost; copies elsewhere are found",
        on_peer.killed,
    ),
    Cell(
        "peer",
        "stop",
        "the calls under way wait for one match deadline, answered by their own daemon; then misses; nothing is lost",
        on_peer.stopped,
    ),
    Cell("peer", "slow", "a transfer ends at its deadline and is a miss; nothing is lost", on_peer.slow),
    Cell(
        "peer",
        "half-header",
        "misses until the nodes are connected again; nothing is lost",
        partial(on_peer.cut, fault=Cut("down", "header")),
    ),
    Cell(
        "peer",
        "half-payload",
        "the cut transfer is a miss, its bytes reach no engine",
        partial(on_peer.cut, fault=Cut("down", "raw")),
    ),
    Cell(
        "peer", "full", "stores and fetches there are refused; its segments are read, there and elsewhere", on_peer.full
    ),
    Cell(
        "peer",
        "flip-arena",
        "bytes with a wrong checksum are a miss, after the report for its own engines as well; only the segments that "
        "only it held are lost, until recomputed",
        on_peer.flipped_in_arena,
    ),
    Cell(
        "peer",
        "flip-wire",
        "bytes with a wrong checksum are a miss; damaged frames are refused, or their keys are misses; nothing is lost",
        on_peer.flipped_on_wire,
    ),
    Cell("engine", "kill", f"{UNNOTICED}; its leases and reservations come back", on_engine.killed),
    Cell(
        "engine",
        "stop",
        f"{UNNOTICED}; its reservations expire into quarantine; when it continues, it harms no other engine and reads "
        "its leased segments",
        on_engine.stopped,
    ),
    Cell(
        "engine",
        "slow",
        f"{UNNOTICED}; its own calls end at their deadlines",
        on_engine.slow,
        {"engine behind the trickle": ANY},
    ),
    Cell("engine", "half-header", f"{RESUMED}; {UNNOTICED}", partial(on_engine.cut, fault=Cut("up", "header"))),
    Cell("engine", "half-payload", f"{RESUMED}; {UNNOTICED}", partial(on_engine.cut, fault=Cut("up", "body"))),
    Cell(
        "engine",
        "full",
        f"the call that cannot map raises an error, and its grants are given back; {UNNOTICED}",
        on_engine.full,
    ),
    Cell(
        "engine",
        "flip-arena",
        "segments that it overwrote after its commit are misses for engines that verify and for all engines of other "
        "nodes",
        on_engine.flipped_in_arena,
    ),
    Cell(
        "engine",
        "flip-wire",
        f"damaged requests are refused or miss; {UNNOTICED}; its grants end with its session",
        on_engine.flipped_on_wire,
        {"engine whose requests are damaged": ANY},
    ),
    Cell(
        "peer",
        "bulk-dead",
        "one fetch is given up within its deadline; no further call waits for the node until its bulk path answers "
        "again, and it is never SUSPECT; nothing is lost",
        partial(on_peer.dropped, drops=(Drop(("up", "down")),)),
    ),
    Cell(
        "peer",
        "bulk-one-way",
        "as bulk-dead, whichever direction is cut off",
        partial(on_peer.dropped, drops=(Drop(("down",)), Drop(("up",)))),
    ),
    Cell(
        "peer",
        "bulk-headers",
        "as bulk-dead, although the headers of the node's replies pass and no byte of a segment",
        partial(on_peer.dropped, drops=(Drop(("down",), "raw"),)),
    ),
    Cell("engine", "flood", f"its requests are refused or wait; {UNNOTICED}", on_engine.flood),
)
"""The cells in the order of the page."""

MEANINGLESS = {
    "daemon/flip-wire": "no segment travels between a daemon and its engine, and a frame does not leave the memory of "
    "one machine: a bit that flips there is a bit that flips in the engine. Malformed frames in both directions are "
    "tested by `tests/server/test_noise.py` and `tests/fuzz/test_decoders.py`",
}
"""The reason why a cell has no scenario."""
