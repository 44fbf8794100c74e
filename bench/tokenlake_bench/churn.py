"""`tokenlake bench churn`: a cluster under load while a node joins, drains, is killed or returns, beside a control run
in which nothing happens.

Half of the requests are of a fixed set of prompts, stored before the run: all of their segments are in the pool, so
whatever is not found is lost or cannot be found. The other half follow a popularity that moves on, as real ones do.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from tokenlake.errors import ConfigurationError, Unreachable
from tokenlake_bench.load import Answer, Asked, Load, hit_rate
from tokenlake_bench.progress import LiveProgress
from tokenlake_bench.report import format_share, output, table, write_json
from tokenlake_bench.sizing import layout_of
from tokenlake_client import Deadlines, Pool
from tokenlake_server.ca import init_ca, issue
from tokenlake_testing.cluster import Cluster, Node, node_names
from tokenlake_testing.etcd import EtcdServers, etcd_version

Change = Literal["join", "drain", "kill", "return", "etcd-down"]
CHANGES: Final[tuple[Change, ...]] = get_args(Change)
BEFORE_S: Final = 6.0
AFTER_S: Final = 6.0
SHOWN: Final = 5
"""Limit of the errors of a round that are shown."""
MEMORY, REGION = "64MiB", "4MiB"
"""Of a daemon: a run evicts nothing, so that a segment that is not found was lost by the change."""
CLUSTER: Final = "churn"
SEGMENT_TOKENS: Final = 16
PROMPT_SEGMENTS: Final = 8
FIXED_PROMPTS: Final = 96
RECENT: Final = 40
"""A request of the moving half asks for one of so many prompts, of which the oldest is replaced by a new one at every
`RENEWED`th request."""
RENEWED: Final = 4
LAYOUT: Final = layout_of(CLUSTER, SEGMENT_TOKENS, 32, layers=2, kv_heads=4)
"""Segments of 16 KiB."""
DEADLINES: Final = Deadlines(call_s=2.0, grace_s=2.0)
"""Of the engines' calls: on a busy machine a daemon may not run for a quarter of a second. Matches have the daemons'
deadline, after which the daemon answers."""


@dataclass(frozen=True, kw_only=True)
class ChurnArguments:
    """Arguments of the command. `change_s`: a change counts as under way for at least so many seconds; what nodes tell
    each other is told within 5 s. Raises ConfigurationError for a value out of range."""

    nodes: int = 8
    changes: tuple[Change, ...] = ()
    rounds: int = 5
    rate: float = 10.0
    change_s: float = 6.0
    encrypt: bool = True
    seed: int = 0
    json_file: Path | None = None

    def __post_init__(self) -> None:
        if not 3 <= self.nodes <= 16:
            raise ConfigurationError("nodes", self.nodes, "3 to 16")
        if self.rounds < 1:
            raise ConfigurationError("rounds", self.rounds, "at least 1")
        for name in ("rate", "change_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(name.replace("_", "-"), getattr(self, name), "a finite number above 0")


class Run(NamedTuple):
    """One run of the load, the seconds at which the change began and was over, and the number of segments that were
    evicted."""

    answers: Sequence[Answer]
    errors: Sequence[str]
    change_s: float
    settled_s: float
    evicted: int

    def before(self) -> list[Answer]:
        """The requests before the change."""
        return [each for each in self.answers if each.at_s < self.change_s]

    def during(self) -> list[Answer]:
        """The requests while the change was under way."""
        return [each for each in self.answers if self.change_s <= each.at_s < self.settled_s]

    def after(self) -> list[Answer]:
        """The requests after the change."""
        return [each for each in self.answers if each.at_s >= self.settled_s]


class ChurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `tokenlake bench churn` for one kind of change; medians over the rounds.

    The hit rates are of the moving half of the load, hit tokens / prompt tokens. `findable_*`: the segments of the
    fixed half that are found, of those that were found before the change. `held_share`: the part of the fixed half
    that the node stored that drains or is killed. `match_p99_ratio`: the p99 of the matches during the change / that
    of the control run in the same seconds. Wrong bytes, errors and evictions are sums.
    """

    change: str
    nodes: int
    encrypt: bool
    rounds: int
    seed: int
    token_hit_rate_before: float
    token_hit_rate_during: float
    token_hit_rate_after: float
    findable_during: float
    findable_after: float
    held_share: float
    match_p99_ratio: float
    match_p99_ms: float
    change_s: float
    wrong_bytes: int
    errors: int
    evicted: int


class Prompts:
    """The prompts of a run, equal in all its engines (`load.Source`)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._draw = random.Random(seed)
        self._requests = 0
        self._fixed = 0

    def draw(self, pool: Pool | None = None) -> Asked:
        """See `load.Source`. A segment of the fixed half that is lost stays lost: it would be found again otherwise."""
        with self._lock:
            self._requests += 1
            fixed = self._draw.random() < 0.5
            if fixed:
                number = self._fixed = (self._fixed + 1) % FIXED_PROMPTS
            else:
                number = FIXED_PROMPTS + RECENT + self._requests // RENEWED - self._draw.randrange(RECENT)
        return Asked(self.tokens(number), not fixed, fixed, number)

    def tokens(self, number: int) -> NDArray[np.uint32]:
        """The tokens of a prompt."""
        draw = np.random.default_rng((self._seed, number))
        return draw.integers(0, 1 << 17, PROMPT_SEGMENTS * SEGMENT_TOKENS, dtype=np.uint32)


def run_churn(arguments: ChurnArguments, console: Console | None = None) -> list[ChurnResult]:
    """Run all changes and print the table. Raises TokenLakeError: `Unreachable` if etcd is not installed, or a daemon
    does not reach the state that it should."""
    console = console or output()
    if etcd_version() is None:
        raise Unreachable("etcd is not installed: a ring that changes needs it (Debian: apt-get install etcd-server)")
    changes = arguments.changes or CHANGES
    results: list[ChurnResult] = []
    with LiveProgress("churn", arguments.rounds * len(changes)) as progress:
        for change in changes:
            rounds: list[ChurnResult] = []
            for number in range(arguments.rounds):
                result, errors = _round(arguments, change, arguments.seed + number)
                rounds.append(result)
                for error in errors[:SHOWN]:
                    progress.say(f"{change}, round {number}: {error}")
                found = format_share(result.findable_during)
                progress.update(len(results) * arguments.rounds + number + 1, f"{change}: found {found} meanwhile")
            results.append(_median(rounds))
    console.print(_table(results))
    write_json(results, arguments.json_file)
    return results


def _round(arguments: ChurnArguments, change: Change, seed: int) -> tuple[ChurnResult, list[str]]:
    """A run with the change and a control run without: (the result, the errors of the engines)."""
    # The node that changes sorts first or last by turns: the node whose name sorts first dials.
    stays = change in ("join", "etcd-down")
    subject = f"node{arguments.nodes}" if stays else f"node{seed % arguments.nodes}"
    run = _run(arguments, change, subject, seed)
    control = _run(arguments, None, subject, seed, run.settled_s - run.change_s)
    during, errors = p99_ms(run.during()), [*run.errors, *control.errors]
    moving = [[each for each in part if not each.asked.fixed] for part in (run.before(), run.during(), run.after())]
    result = ChurnResult(
        change=change,
        nodes=arguments.nodes,
        encrypt=arguments.encrypt,
        rounds=1,
        seed=arguments.seed,
        token_hit_rate_before=hit_rate(moving[0]),
        token_hit_rate_during=hit_rate(moving[1]),
        token_hit_rate_after=hit_rate(moving[2]),
        findable_during=findable(run.before(), run.during()),
        findable_after=findable(run.before(), run.after()),
        held_share=0.0 if stays else len(_fixed_at(seed % arguments.nodes, arguments.nodes)) / FIXED_PROMPTS,
        match_p99_ratio=during / (p99_ms(control.during()) or 1.0),
        match_p99_ms=during,
        change_s=run.settled_s - run.change_s,
        wrong_bytes=sum(each.served.wrong_bytes for each in [*run.answers, *control.answers]),
        errors=len(errors),
        evicted=run.evicted,
    )
    return result, errors


def _fixed_at(place: int, nodes: int) -> range:
    """The prompts of the fixed half that the engine at this node stores."""
    return range(place, FIXED_PROMPTS, nodes)


def _run(arguments: ChurnArguments, change: Change | None, subject: str, seed: int, change_s: float = 0.0) -> Run:
    """One run of the load. `change`: None for the control run, whose phase of the change lasts `change_s`."""
    prompts = Prompts(seed)
    names = node_names(arguments.nodes)
    # The engine of a machine that leaves ends before its daemon does, in the control run as well.
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdServers())
        settings = {"etcd": etcd.endpoints, "cluster": CLUSTER, "drain_s": "30"}
        cluster = Cluster(arguments.nodes, MEMORY, REGION, **settings)
        if change == "join":
            cluster.add(subject)
        if arguments.encrypt:
            authority, _ = init_ca(cluster.directory / "ca", CLUSTER)
            for node in cluster.nodes:
                certificate, key = issue(cluster.directory / "ca", node.name)
                node.settings |= {"certificate": str(certificate), "key": str(key), "ca": str(authority)}
        nodes = {node.name: node for node in cluster.nodes}
        stack.callback(cluster.close)
        for name in names:
            nodes[name].start()
        cluster.wait_ready()
        sockets = [nodes[name].socket for name in names if name != subject]
        load = Load(sockets, LAYOUT, prompts, seed, arguments.rate, DEADLINES, match_s=None)
        for place, name in enumerate(names):
            client = load.connect(nodes[name].socket)
            for number in _fixed_at(place, len(names)):
                client.serve(prompts.tokens(number))
            client.pool.close()
        if change == "return":
            # What the node held is lost before the run; its daemon starts with the change.
            nodes[subject].kill()
            cluster.wait_ready()
        with load:
            time.sleep(BEFORE_S)
            begin_s = load.at_s
            if change is not None:
                _begin(change, nodes.get(subject), etcd)
                cluster.wait_ready()
                change_s = max(arguments.change_s, load.at_s - begin_s)
            time.sleep(max(0.0, begin_s + change_s - load.at_s))
            if change == "etcd-down":
                etcd.restart()
            settled_s = load.at_s
            time.sleep(AFTER_S)
        evicted = int(cluster.totals()["tokenlake_evicted_segments_total"])
    return Run(load.answers, load.errors, begin_s, settled_s, evicted)


def _begin(change: Change, node: Node | None, etcd: EtcdServers) -> None:
    """Begin a change; a node that drains has ended afterwards. Raises Unreachable where it does not end well."""
    if change == "etcd-down":
        etcd.kill()
        return
    assert node is not None
    if change in ("join", "return"):
        node.start()
    elif change == "kill":
        node.kill()
    elif status := node.stop(DRAIN_S):
        raise Unreachable(f"{node.name} ended with status {status}: {node.log.read_text()[-2000:]}")


DRAIN_S: Final = 60.0
"""Seconds within which a node that drains has ended."""


def findable(before: Sequence[Answer], later: Sequence[Answer]) -> float:
    """Of the segments of the fixed prompts that `before` found, those that `later` requests of the same prompts found
    / those that they could have found; 1 where there are none."""
    known: dict[int, int] = {}
    for each in before:
        if each.asked.fixed:
            known[each.asked.number] = max(each.served.hits, known.get(each.asked.number, 0))
    chosen = [each for each in later if each.asked.fixed and each.asked.number in known]
    could = sum(known[each.asked.number] for each in chosen)
    return sum(min(each.served.hits, known[each.asked.number]) for each in chosen) / could if could else 1.0


def p99_ms(answers: Sequence[Answer]) -> float:
    """The p99 of the matches in milliseconds; the longest one where there are less than 100."""
    times = sorted(each.served.match_s * 1e3 for each in answers)
    return times[min(len(times) - 1, len(times) * 99 // 100)] if times else 0.0


def _median(results: Sequence[ChurnResult]) -> ChurnResult:
    """One result with the medians of the figures, and the sums of wrong bytes, errors and evictions."""
    sums = {name: sum(getattr(each, name) for each in results) for name in ("wrong_bytes", "errors", "evicted")}
    medians = {
        name: statistics.median(getattr(each, name) for each in results)
        for name, value in msgspec.structs.asdict(results[0]).items()
        if isinstance(value, float)
    }
    return msgspec.structs.replace(results[0], rounds=len(results), **medians, **sums)


def _table(results: Sequence[ChurnResult]) -> Table:
    rows = {
        "hits before": [format_share(each.token_hit_rate_before) for each in results],
        "hits meanwhile": [format_share(each.token_hit_rate_during) for each in results],
        "hits after": [format_share(each.token_hit_rate_after) for each in results],
        "found meanwhile": [format_share(each.findable_during) for each in results],
        "found after": [format_share(each.findable_after) for each in results],
        "stored by the node": [format_share(each.held_share) for each in results],
        "match p99, ms": [f"{each.match_p99_ms:.1f}" for each in results],
        "match p99, x control": [f"{each.match_p99_ratio:.2f}" for each in results],
        "duration": [f"{each.change_s:.1f} s" for each in results],
        "wrong bytes": [str(each.wrong_bytes) for each in results],
        "errors": [str(each.errors) for each in results],
    }
    title = f"{results[0].nodes} nodes, medians of {results[0].rounds} rounds"
    return table(title, ["", *(each.change for each in results)], [[name, *cells] for name, cells in rows.items()])
