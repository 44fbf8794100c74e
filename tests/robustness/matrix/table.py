"""The table of promises: for each subject and fault a promise and the scenario that checks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.robustness.live import LIMIT_S
from tests.robustness.matrix import on_daemon, on_engine, on_peer
from tests.robustness.matrix.measure import Outcome

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
    Cell("daemon", "half-header", RESUMED, on_daemon.cut_in_header),
    Cell("daemon", "half-payload", RESUMED, on_daemon.cut_in_body),
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
    Cell("peer", "half-header", "misses until the nodes are connected again; nothing is lost", on_peer.cut_in_header),
    Cell("peer", "half-payload", "the cut transfer is a miss, its bytes reach no engine", on_peer.cut_in_payload),
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
    Cell("engine", "half-header", f"{RESUMED}; {UNNOTICED}", on_engine.cut_in_header),
    Cell("engine", "half-payload", f"{RESUMED}; {UNNOTICED}", on_engine.cut_in_body),
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
        on_peer.bulk_dead,
    ),
    Cell("peer", "bulk-one-way", "as bulk-dead, whichever direction is cut off", on_peer.bulk_one_way),
    Cell(
        "peer",
        "bulk-headers",
        "as bulk-dead, although the headers of the node's replies pass and no byte of a segment",
        on_peer.bulk_headers,
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

FOUND = (
    (
        "the leases and reservations of a reply that was cut off stayed until the engine's process ended",
        "test_an_answer_that_was_cut_off_grants_nothing",
    ),
    (
        "after a request without a reply the client sent no further request, and no heartbeat",
        "test_an_answer_that_never_comes_ends_no_service",
    ),
    (
        "one thread closed a connection while another one waited on it: that thread waited for a whole deadline on the "
        "descriptor of a new socket",
        "test_a_broken_connection_is_closed_by_its_reader",
    ),
    (
        "one lease that was never released kept every tenant from getting memory, though other regions had no lease",
        "test_one_unreleased_lease_stops_no_handover",
    ),
    (
        "engines that had mapped a region kept its memory after it was given to another tenant",
        "test_hand_overs_need_no_further_memory",
    ),
    (
        "engines kept the memory of a daemon that had ended, until they had connected to the next one",
        "test_restarts_need_no_second_arena",
    ),
    (
        "one array of an engine kept the memory of a whole region of a daemon that had ended",
        "test_arrays_outlive_the_memory_of_the_daemon",
    ),
    (
        "a forked child of an engine kept the memory of a daemon that had ended",
        "test_a_forked_child_keeps_no_memory",
    ),
    (
        "a tenant that truncated a file of `arena_directory` ended the daemon by SIGBUS; the setting is gone",
        "test_a_tenant_cannot_end_the_daemon_through_its_region",
    ),
    (
        "one frame of an engine kept all others waiting for a second",
        "test_ranges_per_release_are_bounded",
    ),
    (
        "an engine with 208 KiB of unread answers was cut off when it opened a region",
        "test_an_engine_with_unread_answers_opens_a_region",
    ),
    (
        "one tenant could take all sessions",
        "test_a_tenant_takes_its_part_of_the_sessions_only",
    ),
    (
        "connections without a Hello, unread answers and waiting matches took hundreds of MiB",
        "test_waiting_matches_are_bounded_in_bytes",
    ),
    (
        "killed engines in other PID namespaces held their leases for ever on kernels without SO_PEERPIDFD",
        "test_the_slots_of_killed_engines_come_back",
    ),
    (
        "a process in another PID namespace took over the leases of another process by guessing a small number",
        "test_no_process_takes_over_the_leases_of_another",
    ),
    (
        "silent connections to the port for peers kept a restarted node out",
        "test_silent_connections_keep_no_peer_out",
    ),
    (
        "one tenant's sessions, frames, huge queries or pipelined connections to the query engine ended the "
        "service of another tenant",
        "test_a_tenant_that_does_its_worst",
    ),
    (
        "a name in an engine's layout wrote lines of its own into the daemon's log",
        "test_a_layout_forges_no_line_of_the_log",
    ),
    (
        "segments that an operator evicted while a disk was full or set aside were found again",
        "test_evictions_wait_for_a_disk_that_is_aside",
    ),
    (
        "weights that were retired came back with the daemon's restart",
        "test_retired_weights_do_not_return",
    ),
    (
        "a full file system took all segments on disk away, and a daemon that started then did not open it",
        "test_a_full_device_is_opened_for_reads",
    ),
    (
        "one changed bit of the index lost all segments of a device",
        "test_one_changed_bit_of_a_table_costs_no_segment",
    ),
    (
        "each size of segments took 64 MiB of a device beyond its size",
        "test_all_files_stay_within_the_limit",
    ),
)
"""(Defect, the test that shows it)."""
