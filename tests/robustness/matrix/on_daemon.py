"""Faults of an engine's own daemon, which is that of node 0."""

from __future__ import annotations

from tests.robustness.live import flip, match, wait_until
from tests.robustness.matrix.measure import Outcome, asking
from tests.robustness.matrix.proxy import Cut, Trickle
from tests.robustness.matrix.world import world
from tokenlake.wire import Code


def killed(seed: int) -> Outcome:
    """Engines of both nodes read; a fetched lease stays readable; the daemon restarts."""
    with world(seed) as at:
        only_there = at.fill_partly_at(0)
        mine = at.engines[0]
        lease = match(mine.pool, at.prompts[0])
        arrays = lease.fetch()
        at.begin()
        with asking(at.engines, at.read) as wait:
            wait(5)
            at.nodes[0].kill()
            wait(20)
            at.nodes[0].start()
            at.cluster.wait_ready()
        mine.check(at.prompts[0], arrays)
        del arrays
        lease.release()
        wait_until(mine.answered, "its engine is back")
        at.ends(may_lose=only_there)
    return at.outcome


def restarted_with_memory(seed: int, *, killed: bool) -> Outcome:
    """As `killed`, and the memory outlives the daemon: a lease and its arrays go on, and nothing is lost."""
    with world(seed, keep_s="600") as at:
        at.fill_partly_at(0)
        mine, node = at.engines[0], at.nodes[0]
        lease = match(mine.pool, at.prompts[0])
        arrays = lease.fetch()
        at.begin()
        with asking(at.engines, at.read) as wait:
            wait(5)
            if killed:
                node.kill()
            else:
                assert node.stop() == 0
            wait(20)
            node.start()
            at.cluster.wait_ready()
        wait_until(mine.answered, "its engine is back")
        mine.check(at.prompts[0], arrays)
        mine.check(at.prompts[0], lease.fetch())
        del arrays
        lease.release()
        at.ends()
    return at.outcome


def stopped(seed: int) -> Outcome:
    """Engines of both nodes read while the daemon is stopped, and after it continues."""
    with world(seed) as at:
        at.fill()
        at.begin()
        with asking(at.engines, at.read) as wait:
            wait(5)
            at.nodes[0].freeze()
            wait(20)
            at.nodes[0].thaw()
            wait_until(at.engines[0].answered, "it answers")
        at.ends()
    return at.outcome


def slow(seed: int) -> Outcome:
    """The daemon's messages to one engine trickle; another engine of the same daemon is not held up."""
    with world(seed, 1) as at:
        at.fill()
        proxy = at.proxy(0)
        mine = at.engine(0, "engine behind the trickle", proxy)
        assert mine.whole(at.prompts[:1])
        at.begin()
        with asking(at.askers, at.read) as wait:
            wait(2)
            proxy.fault = Trickle("down", 1)
            wait(3)
            proxy.fault = None
        wait_until(mine.answered, "it answers in time again")
        at.ends(mine)
    return at.outcome


def cut(seed: int, fault: Cut) -> Outcome:
    """Five times the connection ends within this part of a reply."""
    with world(seed, 1) as at:
        at.fill()
        proxy = at.proxy(0)
        mine = at.engine(0, "engine that is cut off", proxy)
        session = mine.pool.engine.session
        lease = match(mine.pool, at.prompts[0])
        arrays = lease.fetch()

        at.begin()
        with asking(at.askers, at.read_and_store) as wait:
            for made in range(1, 6):
                wait(2)
                proxy.fault = fault
                wait_until(lambda made=made: proxy.done == made, "the connection is cut")  # type: ignore[misc]
                wait_until(mine.answered, "it is connected again")
        assert mine.pool.engine.session == session, "its session goes on"
        mine.check(at.prompts[0], arrays)
        mine.check(at.prompts[0], lease.fetch())
        del arrays
        lease.release()
        at.ends()
    return at.outcome


def full(seed: int) -> Outcome:
    """One engine leases every slot: the daemon refuses the stores of another engine, and serves its reads."""
    with world(seed, 1, "1MiB", session_lease_share="1") as at:
        at.fill()
        mine, other = at.engines[0], at.engine(0, "engine that finds it full")
        stored = list(at.prompts)
        while at.metric(0, "tokenlake_free_slots"):
            stored.append(at.fresh(len(stored)))
            assert mine.store(stored[-1]) == {Code.COMMITTED}
        at.before = at.found()
        at.begin()
        leases = [match(mine.pool, prompt) for prompt in stored]
        assert sum(lease.hits for lease in leases) == at.metric(0, "tokenlake_slots")
        refused = at.fresh(len(stored))
        assert other.store(refused) == {Code.NO_SLOT}
        for prompt in at.prompts[1:]:
            other.read(prompt)
        for prompt, lease in zip(stored, leases, strict=True):
            mine.check(prompt, lease.fetch())
        at.find_again(other)
        for lease in leases:
            lease.release()
        assert mine.answered()
        assert other.store(refused) == {Code.COMMITTED}, "released slots are given again"
        at.serves()
    return at.outcome


def flipped_in_arena(seed: int) -> Outcome:
    """A bit flips in the first segment of every second prompt. One reader verifies checksums, another does not."""
    with world(seed, 1) as at:
        at.fill()
        reader = at.engine(0, "engine that verifies", verify=True)
        hit = at.prompts[::2]
        for prompt in hit:
            assert flip(at.engines[0].pool, reader.pool.prefix(prompt.tokens).keys[0])
        at.begin()
        counts = [reader.read(prompt) for prompt in at.prompts]
        assert counts == [0 if prompt in hit else prompt.segments for prompt in at.prompts]
        assert reader.pool.corrupt == len(hit)
        wait_until(lambda: at.metric(0, "tokenlake_confirmed_segments_total") == len(hit), "all were checked")
        assert [at.engines[0].read(prompt) for prompt in hit] == [0] * len(hit), "the other reader misses"
        at.find_again(reader, may_lose=len(hit))
        for prompt in hit:
            at.engines[0].store(prompt)
        assert reader.whole(at.prompts), "recomputed"
        assert at.engines[0].whole(at.prompts), "recomputed"
        at.serves()
    return at.outcome
