"""The setting of a scenario: daemons, an engine at each, and segments that some of them hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT,
    Prompt,
    accounted,
    found_keys,
    local_keys,
    total,
    wait_told,
    wait_until,
)
from tests.robustness.matrix.measure import MATCH_S, Asker, Outcome
from tests.robustness.matrix.proxy import Proxy
from tokenlake.hints import Hints
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster

PROMPTS = 12
SEGMENTS = 4
FRESH = 24
"""The number of further prompts, which storing requests take in turn; the arena has room for all of them."""
ENDED_S = 2 * LIMIT_S
"""A lease between nodes that the borrower never learned of ends by itself after 30 s."""


class World:
    """`engines[i]` uses the daemon of node `i`; `links[i]` is a proxy before the port where node `i` accepts other
    nodes."""

    def __init__(self, cluster: Cluster, seed: int, stack: ExitStack) -> None:
        self.cluster = cluster
        self.nodes = cluster.nodes
        self.seed = seed
        self.prompts = [Prompt(1000 * seed + number, SEGMENTS) for number in range(PROMPTS)]
        self.links: list[Proxy] = []
        self.engines: list[Asker] = []
        self.askers: list[Asker] = []
        """These and all others."""
        self.gone: list[Asker] = []
        self.outcome = Outcome()
        self.before: set[bytes] = set()
        """The segments that must be found again."""
        self._stack = stack

    def engine(self, number: int, name: str, proxy: Proxy | None = None, *, verify: bool = False) -> Asker:
        """Another engine at a node."""
        socket = self.nodes[number].socket if proxy is None else proxy.address
        assert not isinstance(socket, tuple)
        asker = Asker(name, self._stack.enter_context(Pool.connect(socket, LAYOUT, verify=verify, deadlines=PATIENT)))
        self.askers.append(asker)
        return asker

    def fresh(self, number: int) -> Prompt:
        """The prompt of this number, which no engine has stored yet."""
        return Prompt(1000 * self.seed + 100 + number, SEGMENTS)

    def read(self, asker: Asker, number: int) -> None:
        """Read one of the prompts, in turn."""
        asker.read(self.prompts[number % len(self.prompts)])

    def leave(self, asker: Asker) -> None:
        """End the session of an engine. Its measurements count; it makes no more requests."""
        asker.pool.close()
        self.gone.append(asker)

    def proxy(self, number: int) -> Proxy:
        """A proxy in front of the socket where node `number` accepts engines."""
        path = self.cluster.directory / f"proxy{number}.sock"
        return self._stack.enter_context(Proxy(self.nodes[number].socket, path, self.seed))

    def fill(self, *askers: Asker) -> None:
        """Each of these engines, or the engine of each node, stores its share of the prompts; returns when the
        directory nodes know the owners. The priority keeps them while engines store new prompts."""
        by = askers or self.engines
        for number, prompt in enumerate(self.prompts):
            codes = by[number % len(by)].store(prompt, patience=LIMIT_S, hints=Hints(priority=1))
            assert codes == {Code.COMMITTED}
        wait_told(self.cluster)
        self.before = self.listed()

    def read_and_store(self, asker: Asker, number: int) -> None:
        """Read one of the prompts and store a fresh one."""
        self.read(asker, number)
        asker.store(self.fresh(number % FRESH))

    def fetch(self, asker: Asker, number: int) -> None:
        """The engine of node 1 stores a new prompt, which this one, at node 0, reads: bytes are fetched. Both read a
        prompt that they stored before, so that these are not the least recently used ones."""
        self.engines[1].store(self.fresh(number))
        asker.read(self.fresh(number))
        for at, engine in enumerate((asker, self.engines[1])):
            engine.read(self.prompts[(2 * number + at) % PROMPTS])

    def fill_partly_at(self, number: int) -> int:
        """The engine of this node stores all prompts. That of the other node reads the second half of them, so that
        both nodes hold that half. Returns the number of segments that only this node has."""
        here, other = self.engines[number], self.engines[1 - number]
        self.fill(here)
        alone, shared = self.prompts[: PROMPTS // 2], self.prompts[PROMPTS // 2 :]
        wait_until(lambda: other.whole(shared), "the other engine has read its part")
        self.before = self.listed()
        assert len(self.before) == PROMPTS * SEGMENTS
        only_there = self.only_at(number)
        assert only_there == len(alone) * SEGMENTS
        return only_there

    def metric(self, number: int, name: str) -> float:
        """A metric of one node, summed over its labels."""
        return total(self.nodes[number], name)

    def begin(self) -> None:
        """Start to measure: the fault comes now."""
        for asker in self.askers:
            asker.begin()

    def found(self, *askers: Asker) -> set[bytes]:
        """The keys that at least one of these engines (without any, of all engines) can fetch, each with a request of
        its own."""
        return set[bytes]().union(*(asker.readable(self.prompts) for asker in askers or self.engines))

    def listed(self) -> set[bytes]:
        """The segments that the engines of all nodes find; no copies are made."""
        return set[bytes]().union(*(found_keys(asker.pool, self.prompts) for asker in self.engines))

    def only_at(self, number: int) -> int:
        """The number of segments that only this node has."""
        held = [local_keys(engine.pool, self.prompts) for engine in self.engines]
        return len(held.pop(number) - set[bytes]().union(*held))

    def find_again(self, *askers: Asker, may_lose: int = 0) -> None:
        """Wait until the segments that may not be lost are found; the others count as lost."""
        self.outcome.may_lose = may_lose
        wait_until(lambda: len(self.before - self.found(*askers)) <= may_lose, f"all but {may_lose} are found again")
        self.outcome.lost = len(self.before - self.found(*askers))

    def ends(self, *askers: Asker, may_lose: int = 0) -> None:
        """What may not be lost is found again, and all engines and daemons serve."""
        self.find_again(*askers, may_lose=may_lose)
        self.serves()

    def serves(self) -> None:
        """Each engine stores a new prompt and reads it, and the slots of every daemon add up."""
        for number, asker in enumerate(asker for asker in self.askers if asker not in self.gone):
            fresh = Prompt(1000 * self.seed + 900 + number, SEGMENTS)
            wait_until(lambda asker=asker, fresh=fresh: asker.store(fresh) <= DONE, "it stores")  # type: ignore[misc]
            wait_until(lambda asker=asker, fresh=fresh: asker.whole([fresh]), "it reads")  # type: ignore[misc]
        for node in self.nodes:
            wait_until(lambda node=node: accounted(node), f"the slots of {node.name} add up", ENDED_S)  # type: ignore[misc]

    def collect(self) -> None:
        """Put the measurements of the engines into the outcome."""
        outcome = self.outcome
        outcome.longest_s = max(asker.longest_s for asker in self.askers)
        outcome.waited_s = {asker.name: asker.waited_s for asker in self.askers}
        outcome.timeouts = {asker.name: asker.timeouts for asker in self.askers}
        outcome.wrong = sum(asker.wrong for asker in self.askers)
        outcome.compared = sum(asker.compared for asker in self.askers)


DONE = {Code.COMMITTED, Code.EXISTS}


@contextmanager
def world(
    seed: int, nodes: int = 2, memory: str = "4MiB", region_size: str = "1MiB", *, linked: bool = False, **settings: str
) -> Iterator[World]:
    """A world whose `outcome` is complete when the block is left. `linked`: proxies forward the messages between nodes.
    The daemons are ended by kill -9, which is faster."""
    settings.setdefault("match_deadline_ms", f"{MATCH_S * 1e3:.0f}")
    with ExitStack() as stack:
        cluster = Cluster(nodes, memory, region_size, **settings)
        made = World(cluster, seed, stack)
        if linked:
            _put_links(made, stack)
        stack.enter_context(cluster)
        stack.callback(_kill, cluster)
        made.engines += [made.engine(number, f"engine of {node.name}") for number, node in enumerate(cluster.nodes)]
        yield made
        made.collect()


def _put_links(made: World, stack: ExitStack) -> None:
    ports = [int(node.settings["listen"].rpartition(":")[2]) for node in made.nodes]
    made.links += [stack.enter_context(Proxy(("127.0.0.1", port), seed=made.seed)) for port in ports]
    for node in made.nodes:
        linked = zip(made.nodes, made.links, strict=True)
        others = [(other.name, link.port) for other, link in linked if other is not node]
        node.settings["peers"] = ",".join(f"{name}=127.0.0.1:{port}" for name, port in others)


def _kill(cluster: Cluster) -> None:
    for node in cluster.nodes:
        if node.running:
            node.kill()
