"""Faults of an engine at node 0; another engine of that node, whose calls count, must not notice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from tests.robustness.live import EngineProcess, Prompt, flip, local_keys, match, outcomes, store, wait_until
from tests.robustness.matrix.measure import Outcome, asking
from tests.robustness.matrix.proxy import Cut, Flip, Trickle
from tests.robustness.matrix.world import World, world
from tests.server.raw import Raw, hello
from tokenlake.errors import TokenLakeError
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine, pack_frame
from tokenlake.wire.engine import MAX_KEYS, MAX_RANGES
from tokenlake_server.engines.connection import HELLO_BYTES

HELD = 6
"""Number of segments that the engine has leased when the fault occurs; it has reserved as many."""


def _reserved(at: World) -> int:
    """The seed of the prompt whose segments the engine has reserved."""
    return 1000 * at.seed + 800


@contextmanager
def _busy(at: World) -> Iterator[EngineProcess]:
    """An engine in a process of its own, with a lease and a reservation."""
    with EngineProcess(at.nodes[0].socket) as engine:
        engine.ask("store", seed=at.seed, segments=HELD)
        assert engine.ask("match", seed=at.seed, segments=HELD)["hits"] == HELD
        assert engine.ask("prepare", seed=_reserved(at), segments=HELD)["codes"] == [Code.RESERVED] * HELD
        yield engine


def killed(seed: int) -> Outcome:
    """The engine is killed while it has a lease and a reservation, and is storing."""
    with world(seed, 1) as at:
        at.fill()
        with _busy(at) as engine:
            at.begin()
            with asking(at.engines, at.read_and_store) as wait:
                wait(3)
                engine.begin("store", seed=at.seed + 1, segments=40)
                engine.kill()
                wait(10)
            at.ends()
        assert outcomes(store(at.engines[0].pool, Prompt(_reserved(at), HELD))) == {Code.COMMITTED}, (
            "the reserved segments can be stored"
        )
    return at.outcome


def stopped(seed: int) -> Outcome:
    """The engine is stopped past its deadlines, and other engines take its slots; when it continues, it writes into
    them and reads its lease."""
    with world(seed, 1, "1MiB", lease_s="0.4", reservation_s="0.4") as at:
        at.fill()
        mine = at.engines[0]
        with _busy(at) as engine:
            at.begin()
            engine.freeze()
            wait_until(lambda: at.metric(0, "tokenlake_quarantined_slots") == HELD, "what it reserved is in quarantine")
            assert mine.store(Prompt(_reserved(at), HELD), patience=5.0) == {Code.COMMITTED}
            # More than the arena holds: all slots that are not kept for the stopped engine get new owners.
            for number in range(40):
                assert mine.store(at.fresh(number), patience=5.0) == {Code.COMMITTED}
            at.prompts = [at.fresh(number) for number in range(30, 40)]
            at.before = at.found()
            leases = [match(mine.pool, prompt) for prompt in at.prompts]
            engine.thaw()
            engine.ask("fill")
            for prompt, lease in zip(at.prompts, leases, strict=True):
                mine.check(prompt, lease.fetch())
                lease.release()
            assert engine.ask("commit")["codes"] == [Code.EXPIRED] * HELD
            assert engine.ask("compare") == {"hits": HELD, "wrong": 0}, "its leased segments are unchanged"
            engine.ask("release")
            assert engine.ask("state")["connected"]
            at.ends()
    return at.outcome


def slow(seed: int) -> Outcome:
    """The requests of the engine arrive a byte at a time."""
    with world(seed, 1) as at:
        at.fill()
        proxy = at.proxy(0)
        engine = at.engine(0, "engine behind the trickle", proxy)
        at.begin()
        with asking(at.askers, at.read_and_store) as wait:
            wait(2)
            proxy.fault = Trickle("up", 1)
            wait(2)
            proxy.fault = None
        wait_until(engine.answered, "it is answered in time again")
        at.ends(engine)
    return at.outcome


def cut(seed: int, fault: Cut) -> Outcome:
    """Five times the engine's connection ends within this part of a request."""
    with world(seed, 1) as at:
        at.fill()
        proxy = at.proxy(0)
        engine = at.engine(0, "engine that is cut off", proxy)
        session = engine.pool.engine.session
        at.begin()
        with asking(at.askers, at.read_and_store) as wait:
            for made in range(1, 6):
                wait(2)
                proxy.fault = fault
                wait_until(lambda made=made: proxy.done == made, "the connection is cut")  # type: ignore[misc]
                wait_until(engine.answered, "it is connected again")
        assert engine.pool.engine.session == session, "its session goes on"
        at.ends(engine)
    return at.outcome


def flood(seed: int) -> Outcome:
    """An engine sends the longest requests, many in one write, and reads no answer; others never send their Hello."""
    with world(seed, 1) as at, ExitStack() as open_:
        at.fill()
        keys = random.Random(seed).randbytes(KEY_BYTES * MAX_KEYS)
        floods = (
            b"".join(pack_frame(engine.Heartbeat(number)) for number in range(6500)),
            b"".join(pack_frame(engine.Match(number, keys, 0.1)) for number in range(100)),
            pack_frame(engine.Release(((1, 0, 1 << 31),) * MAX_RANGES)) * 100,
            pack_frame(engine.Release(((1, 0, 1),) * 100 * MAX_RANGES)),
        )
        at.begin()
        with asking(at.engines, at.read_and_store) as wait:
            for flood in floods:
                raw = open_.enter_context(Raw(at.nodes[0].socket))
                raw.send(hello())
                raw.sock.settimeout(0.2)
                with suppress(TimeoutError):
                    raw.write(flood)
                wait(5)
            for _ in range(100):
                open_.enter_context(Raw(at.nodes[0].socket)).write((HELLO_BYTES).to_bytes(4, "little"))
            wait(5)
        open_.close()
        at.ends()
    return at.outcome


def full(seed: int) -> Outcome:
    """The engine's address space is used up: it can map no region, neither to store nor to read."""
    with world(seed, 1, "64MiB", "64MiB") as at, EngineProcess(at.nodes[0].socket) as engine:
        at.fill()
        engine.ask("limit", nbytes=32 << 20)
        at.begin()
        for command, number in (("store", seed), ("match", 1000 * seed)):
            engine.begin(command, seed=number, segments=4)
            assert "Cannot allocate memory" in engine.finish()["reason"]
        engine.ask("release")
        with asking(at.engines, at.read_and_store) as wait:
            wait(5)
        at.ends()
        engine.ask("limit", nbytes=None)
        assert set(engine.ask("store", seed=seed, segments=4)["codes"]) == {Code.COMMITTED}
        assert engine.ask("match", seed=seed, segments=4)["wrong"] == 0
    return at.outcome


def flipped_in_arena(seed: int) -> Outcome:
    """The engine writes into committed segments: neither verifying engines nor engines of other nodes read them."""
    with world(seed) as at:
        only_there = at.fill_partly_at(0)
        writer, elsewhere = at.engines
        reader = at.engine(0, "engine that verifies", verify=True)
        here = local_keys(writer.pool, at.prompts)
        for key in [key for prompt in at.prompts for key in writer.pool.prefix(prompt.tokens).keys if key in here]:
            assert flip(writer.pool, key)
        at.begin()
        for prompt in at.prompts:
            reader.read(prompt)
            elsewhere.read(prompt)
        at.ends(reader, elsewhere, may_lose=only_there)
    return at.outcome


def flipped_on_wire(seed: int) -> Outcome:
    """A bit flips in one of three requests of the engine, which verifies checksums."""
    with world(seed, 1, lease_s="1") as at:
        at.fill()
        proxy = at.proxy(0)
        engine = at.engine(0, "engine whose requests are damaged", proxy, verify=True)
        assert engine.whole(at.prompts)
        engine.store(at.fresh(50))
        engine.misses = TokenLakeError
        at.begin()
        with asking(at.askers, at.read_and_store) as wait:
            proxy.fault = Flip("up", "body", 3)
            wait(40)
            proxy.fault = None
        wait_until(engine.answered, "it is answered again")
        at.leave(engine)
        at.ends()
    return at.outcome
