"""An engine instance as a queue, against schedules worked out by hand, and against an instance that takes single
steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenlake_bench.engine_model import Chunk
from tokenlake_bench.routing.instance import Instance, InstanceOptions, Job


class PerToken:
    """A step takes 1 s for each token of a prompt, and 1 s if anything decodes."""

    def __init__(self) -> None:
        self.steps: list[tuple[list[Chunk], int, int]] = []

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        self.steps.append((list(chunks), decoding, context))
        return float(sum(chunk.new for chunk in chunks) + (decoding > 0))


class ByContext:
    """As `PerToken`, plus 1 ms per token that decoding attends to. The middle one of joined steps has their mean
    length."""

    def step_s(self, chunks: Sequence[Chunk], decoding: int, context: int) -> float:
        return sum(chunk.new + chunk.cached / 1000 for chunk in chunks) + (decoding > 0) + context / 1000


def drain(instance: Instance) -> list[Job]:
    finished: list[Job] = []
    while (due := instance.next_event()) < math.inf:
        finished += instance.advance(due)
    return finished


def test_one_request_alone() -> None:
    """10 tokens in chunks of 4, 4 and 2 s, the first token at 10; two more tokens of 1 s each."""
    engine = PerToken()
    instance = Instance(engine, InstanceOptions(chunk_tokens=4, batch=4))
    job = Job(0, prompt=13, output=3, cached=3)
    instance.submit(job, 0.0)
    assert drain(instance) == [job]
    assert (job.began_s, job.first_s, job.finished_s) == (0.0, 10.0, 12.0)
    chunks = [Chunk(4, 3, False), Chunk(4, 7, False), Chunk(2, 11, True)]
    assert [step[0] for step in engine.steps] == [[chunk] for chunk in chunks] + [[]]
    # Both further tokens are joined: the first attends to 14 tokens, the second to 15, the middle is taken as 14.
    assert engine.steps[-1] == ([], 1, 14)
    assert instance.pending == 0


def test_a_second_prompt_waits_while_decoding_goes_on() -> None:
    """Chunks of 4. A: 4 tokens of prompt, 4 of output. B: 6 of prompt, 1 of output, arrives at 1.

    0-4 A's prompt; A's first token. Then a chunk has room for 3 tokens beside A's decoding:
    4-8 A decodes, 3 of B; 8-12 A decodes, 3 of B, which is done; 12-13 A decodes and is done.
    """
    instance = Instance(PerToken(), InstanceOptions(chunk_tokens=4, batch=4))
    a, b = Job(0, 4, 4), Job(1, 6, 1)
    instance.submit(a, 0.0)
    instance.submit(b, 1.0)
    assert drain(instance) == [b, a]
    assert (a.first_s, a.finished_s) == (4.0, 13.0)
    assert (b.began_s, b.first_s, b.finished_s) == (4.0, 12.0, 12.0)


def test_two_prompts_share_a_step() -> None:
    engine = PerToken()
    instance = Instance(engine, InstanceOptions(chunk_tokens=10, batch=4))
    a, b = Job(0, 20, 1, cached=18), Job(1, 3, 1)
    instance.submit(Job(9, 1, 1), 0.0)
    instance.submit(a, 0.0)
    instance.submit(b, 0.5)
    drain(instance)
    assert engine.steps[1][0] == [Chunk(2, 18, True), Chunk(3, 0, True)]
    assert a.first_s == b.first_s == 6.0


def test_a_prompt_begins_when_its_first_tokens_are_computed() -> None:
    """The batch has room for the second prompt at once, but the prompt begins in the first chunk that computes tokens
    of it: until then the prompt ahead may still compute a prefix that both share."""
    instance = Instance(PerToken(), InstanceOptions(chunk_tokens=4, batch=4))
    jobs = [Job(0, 10, 1), Job(1, 6, 1), Job(2, 1, 1)]
    for job in jobs:
        instance.submit(job, 0.0)
    drain(instance)
    assert [job.began_s for job in jobs] == [0.0, 8.0, 16.0]
    assert [job.first_s for job in jobs] == [12.0, 16.0, 17.0]


def test_memory_bounds_what_is_under_way() -> None:
    """10 tokens of memory: A (6) and B (4) fill it. D (20) is larger than the memory and runs alone after both. C (3)
    was submitted after D and waits for it."""
    instance = Instance(PerToken(), InstanceOptions(chunk_tokens=100, batch=4, memory_tokens=10))
    a, b, c, d = Job(0, 5, 1), Job(1, 3, 1), Job(2, 2, 1), Job(3, 19, 1)
    for job in (a, b, d, c):
        instance.submit(job, 0.0)
    drain(instance)
    assert a.began_s == 0.0
    assert b.began_s == 5.0
    assert d.began_s == 8.0
    assert c.began_s == d.finished_s == 27.0


def test_a_shared_prefix_takes_memory_once() -> None:
    """16 tokens of memory: A (14), and B, which shares both segments of A (8) and takes 2 more. C would take 6 more."""
    limits = InstanceOptions(chunk_tokens=100, batch=4, memory_tokens=16, segment_tokens=4)
    instance = Instance(PerToken(), limits)
    a, b, c = Job(0, 9, 5, (1, 2)), Job(1, 9, 1, (1, 2)), Job(2, 9, 1, (1, 3))
    for job in (a, b, c):
        instance.submit(job, 0.0)
    drain(instance)
    assert a.first_s == b.began_s < a.finished_s
    assert c.began_s == a.finished_s
    assert instance.pending == 0


def test_waiting_is_that_of_an_m_d_1_queue() -> None:
    """Pollaczek-Khinchine: at a load of 0.7 and a service of 1 s, 0.7 / (2 x 0.3) s on average."""
    instance = Instance(PerToken(), InstanceOptions(chunk_tokens=1, batch=1))
    rng = random.Random(7)
    jobs: list[Job] = []
    arrivals: list[float] = []
    at_s = 0.0
    for number in range(40_000):
        at_s += rng.expovariate(0.7)
        while (due := instance.next_event()) <= at_s:
            instance.advance(due)
        jobs.append(Job(number, 1, 1))
        arrivals.append(at_s)
        instance.submit(jobs[-1], at_s)
    drain(instance)
    waits = [job.began_s - arrived for job, arrived in zip(jobs, arrivals, strict=True)]
    assert sum(waits) / len(waits) == pytest.approx(0.7 / 0.6, rel=0.05)


REQUESTS = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 30), st.integers(1, 90)), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(REQUESTS, st.sampled_from([None, 60]))
def test_every_job_finishes_and_steps_are_in_order(requests: list[tuple[float, int, int]], memory: int | None) -> None:
    """However requests arrive: all finish, in order of time, none faster than alone, and memory ends empty."""
    instance = Instance(ByContext(), InstanceOptions(chunk_tokens=8, batch=4, memory_tokens=memory))
    jobs = [Job(number, prompt, output) for number, (_, prompt, output) in enumerate(requests)]
    arrivals = sorted((at_s, number) for number, (at_s, _, _) in enumerate(requests))
    finished: list[Job] = []
    for at_s, number in arrivals:
        while (due := instance.next_event()) <= at_s:
            finished += instance.advance(due)
        instance.submit(jobs[number], at_s)
    finished += drain(instance)
    assert sorted(job.number for job in finished) == list(range(len(jobs)))
    assert [job.finished_s for job in finished] == sorted(job.finished_s for job in finished)
    for at_s, number in arrivals:
        job = jobs[number]
        assert job.began_s >= at_s - 1e-6
        assert job.first_s >= job.began_s + job.prompt - 1e-6
        context = sum(job.prompt + k for k in range(1, job.output)) / 1000
        assert job.finished_s >= job.first_s + (job.output - 1) + context - job.output / 1000 - 1e-6
    assert instance.pending == 0


@settings(max_examples=100, deadline=None)
@given(REQUESTS)
def test_joined_steps_are_like_single_steps(requests: list[tuple[float, int, int]]) -> None:
    def run(longest: int) -> list[tuple[float, float]]:
        instance = Instance(PerToken(), InstanceOptions(chunk_tokens=8, batch=8))
        jobs = [Job(number, prompt, output) for number, (_, prompt, output) in enumerate(requests)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tokenlake_bench.routing.instance._MAX_STEPS", longest)
            for at_s, number in sorted((at_s, number) for number, (at_s, _, _) in enumerate(requests)):
                while (due := instance.next_event()) <= at_s:
                    instance.advance(due)
                instance.submit(jobs[number], at_s)
            drain(instance)
        return [(job.first_s, job.finished_s) for job in jobs]

    single, together = run(1), run(64)
    for one, other in zip(single, together, strict=True):
        assert one == pytest.approx(other, abs=1e-6)
