"""The plug-in's choices without a router, with real daemons: faults of the pool, TLS, a tokenizer in the process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, store, wait_told, wait_until
from tests.routers.between import Between
from tests.routers.scene import under_way
from tests.server.control.scene import certificates, served, socket_of
from tokenlake_client import Pool
from tokenlake_client.routers.choice import Candidate, Choice, Chooser, Outcome
from tokenlake_client.routers.settings import RouterSettings, read_settings
from tokenlake_client.routers.tokens import Instance
from tokenlake_client.routers.tokens import Prompt as Asked
from tokenlake_testing.cluster import Cluster

pytestmark = [pytest.mark.live, pytest.mark.timeout(120), pytest.mark.rest]

A, B = (Instance(f"http://{name}/v1", "m", None) for name in ("a", "b"))
PATIENT_MS = 5000.0
SEGMENTS = 16
"""Of a prompt: longer than an answer is expected to be, so that a request whose end is not reported yet changes no
choice."""
seeds = itertools.count(1000)


def at(*nodes: str) -> list[Candidate]:
    """The instances A and B, at these nodes."""
    return [Candidate(instance, node) for instance, node in zip((A, B), nodes, strict=True)]


BOTH = at("node0", "node1")


class Asker:
    """A chooser on a loop of its own."""

    def __init__(self, settings: RouterSettings) -> None:
        self._loop = asyncio.new_event_loop()
        self.chooser = Chooser(settings)
        self._names = itertools.count()

    def run(self, work: Awaitable[Any]) -> Any:
        """Wait for something on the loop."""
        return self._loop.run_until_complete(work)

    async def choose(self, prompt: Asked, among: Sequence[Candidate] = BOTH) -> Choice:
        """The choice for a new request, which ends at once."""
        name = str(next(self._names))
        choice = await self.chooser.choose(name, prompt, among, None, None)
        self.chooser.finished(name, 1)
        return choice

    def ask(self, tokens: Sequence[int], among: Sequence[Candidate] = BOTH) -> Choice:
        """The choice for a new request of these tokens and one more, which ends at once."""
        choice: Choice = self.run(self.choose(Asked(ids=[*tokens, 1]), among))
        return choice

    def wait_chosen(self, tokens: Sequence[int] = (1, 2)) -> Choice:
        """Ask until the pool chooses."""
        last: list[Choice] = []

        def chosen() -> bool:
            last[:] = [self.ask(tokens)]
            return last[0].outcome is Outcome.CHOSEN

        wait_until(chosen, "the pool chooses")
        return last[0]

    def close(self) -> None:
        self.run(self.chooser.close())
        self._loop.close()


@pytest.fixture
def asker() -> Iterator[Callable[..., Asker]]:
    """Makes askers by their settings; each has asked the pool once."""
    made: list[Asker] = []

    def make(**settings: Any) -> Asker:
        made.append(Asker(read_settings(settings, {})))
        made[-1].wait_chosen()
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """Two daemons that are not started yet."""
    cluster = Cluster(2, "4MiB", "1MiB", match_deadline_ms="2000")
    cluster.deadlines = PATIENT
    return cluster


@pytest.fixture(scope="module")
def addresses(cluster: Cluster) -> dict[str, str]:
    """Control ports with TLS, by node."""
    return served(cluster)


@pytest.fixture(scope="module")
def two(cluster: Cluster, addresses: dict[str, str]) -> Iterator[Cluster]:
    """The daemons."""
    with cluster:
        yield cluster


@pytest.fixture(scope="module")
def pools(two: Cluster) -> Iterator[list[Pool]]:
    """One pool at each node."""
    pools = [two.connect(number, LAYOUT) for number in range(2)]
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def between(two: Cluster, pools: list[Pool]) -> Iterator[Between]:
    """Between the router and node0."""
    between = Between(two.nodes[0])
    yield between
    between.close()


def stored(cluster: Cluster, pool: Pool) -> list[int]:
    """The tokens of a new prompt whose cache lies at one node."""
    prompt = Prompt(next(seeds), SEGMENTS)
    store(pool, prompt)
    wait_told(cluster)
    return prompt.tokens


def test_a_slow_pool_is_left_alone_until_it_answers_again(
    two: Cluster, pools: list[Pool], between: Between, asker: Callable[..., Asker]
) -> None:
    tokens = stored(two, pools[1])
    router = asker(control=[str(between.socket)], deadline_ms=300)
    between.pause_s = 1.0
    assert router.ask(tokens).outcome is Outcome.LATE
    wait_until(lambda: router.ask(tokens).outcome is Outcome.UNREACHABLE, "requests do not wait")
    between.pause_s = 0.0
    assert router.wait_chosen(tokens).instance == B.base
    wait_until(lambda: under_way(two) == 0, "no late answer is counted as a request")


def test_a_client_that_leaves_before_the_choice(two: Cluster, between: Between, asker: Callable[..., Asker]) -> None:
    """A client that goes away before the choice leaves nothing under way."""
    router = asker(control=[str(between.socket)], deadline_ms=PATIENT_MS)
    between.pause_s = 0.5
    asked, answered = between.asked, between.answered

    async def gone() -> None:
        choice = asyncio.create_task(router.choose(Asked(ids=[1, 2])))
        while between.asked == asked:
            await asyncio.sleep(0.01)
        choice.cancel()
        with pytest.raises(asyncio.CancelledError):
            await choice

    router.run(gone())
    wait_until(lambda: between.answered > answered, "the daemon has counted the request")
    wait_until(lambda: under_way(two) == 0, "the daemon is told")


def test_an_instance_at_an_unknown_node_has_no_prefix(
    two: Cluster, pools: list[Pool], asker: Callable[..., Asker]
) -> None:
    router = asker(control=[str(socket_of(two.nodes[0]))], deadline_ms=PATIENT_MS)
    tokens = stored(two, pools[1])
    choice = router.ask(tokens, at("nowhere", "node1"))
    assert (choice.outcome, choice.instance, choice.start.moved_tokens) == (Outcome.CHOSEN, B.base, 0)
    choice = router.ask(tokens, at("nowhere", "elsewhere"))
    assert (choice.outcome, choice.start.moved_tokens) == (Outcome.CHOSEN, len(tokens))


def test_control_ports_with_certificates(
    two: Cluster,
    addresses: dict[str, str],
    pools: list[Pool],
    asker: Callable[..., Asker],
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokens = stored(two, pools[1])
    held = certificates(two.directory / "ca", "router-1", role="scheduler")
    files = {"certificate": str(held.certificate), "key": str(held.key), "ca": str(held.ca)}
    control = [f"{node}={address}" for node, address in addresses.items()]
    assert asker(control=control, deadline_ms=PATIENT_MS, **files).ask(tokens).instance == B.base
    # The certificate must be that of the node: the second one is asked.
    swapped = [f"node1={addresses['node0']}", f"node1={addresses['node1']}"]
    router = asker(control=swapped, deadline_ms=PATIENT_MS, **files)
    assert router.ask(tokens).instance == B.base
    # A reader may not ask where requests start.
    reader = certificates(two.directory / "ca", "reader-1", role="reader")
    files |= {"certificate": str(reader.certificate), "key": str(reader.key)}
    refused = Asker(read_settings({"control": control, "deadline_ms": PATIENT_MS, **files}, {}))
    try:
        wait_until(lambda: "needs the role scheduler, which 'reader-1' does not have" in caplog.text, "it is refused")
        assert refused.ask(tokens).outcome is Outcome.UNREACHABLE
    finally:
        refused.close()


@pytest.mark.timeout(300)
def test_a_tokenizer_in_the_process_finds_what_the_engine_stored(
    two: Cluster, pools: list[Pool], tmp_path: Path, asker: Callable[..., Asker]
) -> None:
    # Imported before the choice: on a busy machine that takes longer than the longest deadline of a choice.
    assert pytest.importorskip("transformers").AutoTokenizer
    from tokenlake_testing.tiny_model import save_tokenizer

    directory = save_tokenizer(tmp_path / "tokenizer")
    tokens = [each % 1000 for each in Prompt(next(seeds), SEGMENTS).tokens]
    prompt = Prompt(next(seeds), 0)
    prompt.tokens, prompt.segments = tokens, SEGMENTS
    store(pools[1], prompt)
    wait_told(two)
    control = [str(socket_of(two.nodes[0]))]
    router = asker(control=control, deadline_ms=60_000, tokenizer=str(directory))
    text = " ".join(f"t{each}" for each in [*tokens, 1])
    chat = Asked({"messages": [{"role": "user", "content": text}]})
    for asked in (Asked({"prompt": text, "add_special_tokens": True}), chat):
        choice = router.run(router.choose(asked))
        assert (choice.instance, choice.tokens, choice.start.prefix_tokens) == (B.base, len(tokens) + 1, len(tokens))
    wrong = Asked({"messages": [{"role": "user", "content": text}], "chat_template": "{{ nothing.of.this }}"})
    assert router.run(router.choose(wrong)).outcome is Outcome.NO_TOKENS
