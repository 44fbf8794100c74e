"""Small clusters on simulated time: their figures must add up, and be equal in equal runs."""

from __future__ import annotations

import random

import msgspec
import pytest

from tokenlake.core.cluster.serve import SENT, SENT_BYTES, SENT_TO_READERS
from tokenlake.core.engines.write import STORED
from tokenlake.core.report.account import ASKED, SUPPLIED, Source
from tokenlake.core.report.misses import MISSED
from tokenlake.metrics import Metric
from tokenlake.wire import Code
from tokenlake_bench.balance import Spread
from tokenlake_bench.baselines import Accesses, Prompt, global_lru, infinite_cache
from tokenlake_bench.simulation.arrivals import arrivals_of
from tokenlake_bench.simulation.network import Link
from tokenlake_bench.simulation.options import SimulationOptions
from tokenlake_bench.simulation.run import Figures, Simulation
from tokenlake_bench.sizing import layout_of

TOKENS = 512
LAYOUT = layout_of("simulated", TOKENS, 128, layers=32, kv_heads=8, dtype="bfloat16")
"""Of Llama-3-8B: 64 MiB for 512 tokens."""
NODE_SEGMENTS = 120


def conversations(requests: int, seed: int = 0, gap_s: float = 0.5) -> Accesses:
    """Turns of open conversations, each a template, its own past and something new, and a part of a segment."""
    draw = random.Random(seed)
    numbers = iter(range(1 << 30))
    templates = [[next(numbers) for _ in range(draw.randint(2, 5))] for _ in range(3)]
    chains = [list(draw.choice(templates)) for _ in range(20)]
    prompts: list[Prompt] = []
    for at in range(requests):
        which = draw.randrange(len(chains))
        if len(chains[which]) > 14:
            chains[which] = list(draw.choice(templates))
        chains[which] += [next(numbers) for _ in range(draw.randint(1, 3))]
        tokens = len(chains[which]) * TOKENS + draw.randrange(TOKENS)
        prompts.append(Prompt(tokens, tuple(chains[which]), at * gap_s + draw.random() * gap_s))
    return Accesses(TOKENS, prompts)


def options(nodes: int, **other: object) -> SimulationOptions:
    """Options of a cluster with `NODE_SEGMENTS` at each node."""
    return SimulationOptions(nodes=nodes, capacity_tokens=nodes * NODE_SEGMENTS * TOKENS, layout=LAYOUT, **other)  # type: ignore[arg-type]


def simulate(accesses: Accesses, how: SimulationOptions) -> Simulation:
    """The finished run: each request has its answer, and the cluster is idle and consistent."""
    simulation = Simulation(how)
    simulation.run(arrivals_of(accesses))
    assert simulation.cluster.idle()
    assert simulation.done == len(accesses.prompts)
    simulation.cluster.check_integrity()
    return simulation


def result(simulation: Simulation) -> Figures:
    """The figures that must not depend on this machine."""
    return msgspec.structs.replace(simulation.figures(), processor_s=0.0)


def counted(simulation: Simulation, metric: Metric) -> int:
    """A counter summed over all nodes."""
    return sum(node.core.counters[metric] for node in simulation.cluster.nodes)


def hit_tokens(simulation: Simulation, accesses: Accesses) -> int:
    """The prompt tokens that engines found in the pool."""
    return round(simulation.figures().token_hit_rate * accesses.prompt_tokens)


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    accesses = conversations(150)
    first = result(simulate(accesses, options(4)))
    assert result(simulate(accesses, options(4))) == first
    assert result(simulate(accesses, options(4, seed=1))) != first


def test_hit_tokens_equal_the_nodes_counters() -> None:
    accesses = conversations(200)
    simulation = simulate(accesses, options(4))
    asked = sum(len(prompt.chain) for prompt in accesses.prompts) * TOKENS
    assert counted(simulation, ASKED) == asked
    assert asked == sum(counted(simulation, metric) for metric in (SUPPLIED, MISSED))
    hits = hit_tokens(simulation, accesses)
    assert 0 < hits == counted(simulation, SUPPLIED)
    assert counted(simulation, STORED) == simulation.stored[Code.COMMITTED] > 0


def test_sent_bytes_equal_the_nodes_counters() -> None:
    accesses = conversations(200)
    simulation = simulate(accesses, options(4))
    segment_bytes = simulation.cluster.size.layout.segment_bytes
    figures, sent = simulation.figures(), simulation.cluster.sent
    assert figures.bytes_moved == counted(simulation, SENT_BYTES) == counted(simulation, SENT) * segment_bytes
    assert sent.totals() == [node.core.counters[SENT_BYTES] for node in simulation.cluster.nodes]
    for_readers = [node.core.counters[SENT_TO_READERS] * segment_bytes for node in simulation.cluster.nodes]
    # Requests come one at a time: no request waits for another's fetch, so that each remote hit is one read.
    hits = hit_tokens(simulation, accesses) // TOKENS
    assert sum(for_readers) == round(simulation.figures().remote_share * hits) * segment_bytes > 0


def test_own_reads_are_no_load() -> None:
    prompts = [Prompt(4 * TOKENS, (*range(4),), 2.0 * at) for at in range(20)]
    simulation = simulate(Accesses(TOKENS, prompts), options(2))
    figures = simulation.figures()
    # The second request reads the segments that node 0 computed; all later ones find them at their own node.
    assert sum(simulation.cluster.sent.totals()) == 4 * simulation.cluster.size.layout.segment_bytes
    assert figures.remote_share == pytest.approx(4 / (19 * 4))
    assert figures.load == Spread(cv=1.0, max_over_mean=2.0)


def test_one_node_finds_what_one_cache_of_its_size_finds() -> None:
    accesses = conversations(300)
    simulation = simulate(accesses, options(1))
    cache = global_lru(accesses, NODE_SEGMENTS * TOKENS)
    assert cache.hit_tokens < infinite_cache(accesses).hit_tokens
    assert hit_tokens(simulation, accesses) == pytest.approx(cache.hit_tokens, rel=0.04)
    assert simulation.figures().bytes_moved == 0


def test_a_pool_that_holds_everything_finds_all_there_is() -> None:
    accesses = conversations(150)
    many = SimulationOptions(nodes=4, capacity_tokens=4 * 2000 * TOKENS, layout=LAYOUT)
    assert hit_tokens(simulate(accesses, many), accesses) == infinite_cache(accesses).hit_tokens


def test_a_match_on_a_slow_network_finds_local_segments() -> None:
    accesses = conversations(60, gap_s=2.0)
    simulation = simulate(accesses, options(2, link=Link(latency_s=0.03)))
    by_source = [node.core.counters.by_labels(SUPPLIED) for node in simulation.cluster.nodes]
    sources = {source for each in by_source for (_, source), tokens in each.items() if tokens}
    assert sources == {Source.LOCAL}
