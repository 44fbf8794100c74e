"""Deadlines, overdue daemons and broken connections."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.client.connections import answers, scripted_link
from tests.robustness.live import (
    LAYOUT,
    LIMIT_S,
    PATIENT_S,
    Prompt,
    daemons,
    match,
    outcomes,
    read,
    store,
    total,
    wait_told,
    wait_until,
)
from tokenlake.errors import DeadlinePassed, LimitReached, Unreachable
from tokenlake.wire import Code, engine
from tokenlake_client import Deadlines, Pool
from tokenlake_client.channel import Channel
from tokenlake_testing.cluster import Cluster

pytestmark = pytest.mark.live


def test_calls_fail_at_once_without_a_daemon(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        cluster.nodes[0].kill()
        for _ in range(50):
            with pytest.raises(Unreachable):
                pool.match([])
        assert pool.engine.timeouts == 0


def test_a_frozen_daemon_costs_one_deadline(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    prompt = Prompt(5, 40)
    with cluster.connect(0, LAYOUT) as pool:
        store(pool, prompt)
        keys = pool.prefix(prompt.tokens).keys
        node.freeze()
        with pytest.raises(DeadlinePassed, match="did not answer within"):
            pool.match(keys)
        for _ in range(100):
            with pytest.raises(DeadlinePassed, match="still owes"):
                pool.match(keys)
            with pytest.raises(DeadlinePassed, match="still owes"):
                pool.store(keys)
        assert pool.engine.timeouts == 1
        node.thaw()
        wait_until(lambda: answers(pool), "it answers again")
        # The late reply granted a lease of 40 of the 120 segments that a session may lease: three more leases of 40 fit
        # only after the client has given it back.
        leases = [match(pool, prompt) for _ in range(3)]
        assert [lease.hits for lease in leases] == [40] * 3
        for lease in leases:
            lease.release()
        assert pool.connected


def test_a_frozen_daemon_costs_each_thread_one_deadline(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool, ThreadPoolExecutor(4) as threads:

        def given_up(_: int) -> bool:
            with pytest.raises(DeadlinePassed):
                pool.match([], deadline_s=1.0)
            return True

        cluster.nodes[0].freeze()
        assert all(threads.map(given_up, range(80)))
        # The three other threads, and the heartbeat, may have sent a call before the first call timed out.
        assert 1 <= pool.engine.timeouts <= 5
        cluster.nodes[0].thaw()
        wait_until(lambda: answers(pool), "it answers again")


def test_a_fetch_without_deadline_of_a_frozen_daemon() -> None:
    """The fetch has no deadline of the caller's: the daemon predicts one. A client notices a frozen daemon when a
    heartbeat has no reply."""
    with daemons(3) as cluster, cluster.connect(0, LAYOUT) as writer, cluster.connect(2, LAYOUT) as reader:
        prompt = Prompt(10, 8)
        store(writer, prompt)
        wait_told(cluster)
        lease = match(reader, prompt)
        assert lease.local_hits < lease.hits == 8
        cluster.nodes[2].freeze()
        with pytest.raises(DeadlinePassed):
            lease.fetch()
        assert reader.engine.timeouts == 1, "it costs one deadline of a call"
        with pytest.raises(DeadlinePassed, match="still owes"):
            lease.fetch()
        cluster.nodes[2].thaw()
        wait_until(lambda: answers(reader), "it answers again")
        lease.release()
        wait_until(lambda: read(reader, prompt) == 8, "all is found again")


def test_a_fetch_with_the_deadline_of_its_pool() -> None:
    """The owner pauses for longer than the daemon of the reader predicts that the transfer takes."""
    one, other = Prompt(11, 8), Prompt(12, 8)
    deadlines = Deadlines(call_s=PATIENT_S, fetch_s=LIMIT_S)
    with daemons(2, suspect_ms="60000") as cluster, cluster.connect(0, LAYOUT) as writer:
        owner, node = cluster.nodes
        for prompt in (one, other):
            store(writer, prompt)
        wait_told(cluster)
        with (
            Pool.connect(node.socket, LAYOUT, deadlines=deadlines) as patient,
            cluster.connect(1, LAYOUT) as reader,
            match(patient, one) as waiting,
            match(reader, other) as lease,
            ThreadPoolExecutor(1) as thread,
        ):
            assert waiting.local_hits < waiting.hits == 8
            assert lease.local_hits < lease.hits == 8
            owner.freeze()
            fetch = thread.submit(waiting.fetch)
            wait_until(lambda: node.metrics()['tokenlake_map_entries{map="transfers"}'] > 0, "the transfer began")
            assert len(lease.fetch()) < 8, "the control: its deadline, which began later, has passed"
            assert not fetch.done()
            owner.thaw()
            arrays = fetch.result()
            assert (len(arrays), one.wrong(arrays)) == (8, 0)


def test_a_request_that_is_too_large_is_not_sent(cluster: Cluster) -> None:
    with cluster.connect(0, LAYOUT) as pool:
        with pytest.raises(LimitReached, match="max_frame"):
            pool.link.call(lambda number: engine.Prepare(number, bytes(32 << 18), 0), engine.Prepared)
        assert pool.match([], deadline_s=PATIENT_S).hits == 0


class _BrokenBeforePoll(socket.socket):
    """A socket whose channel another thread closes right before the reader polls its descriptor."""

    channel: Channel | None = None
    same_descriptor = False

    def fileno(self) -> int:
        number = super().fileno()
        channel, self.channel = self.channel, None
        if channel is not None:
            identity = os.fstat(number).st_ino
            breaker = threading.Thread(target=channel.close)
            breaker.start()
            breaker.join()
            self.same_descriptor = super().fileno() == number and os.fstat(number).st_ino == identity
        return number


def test_a_broken_connection_is_closed_by_its_reader() -> None:
    """Only the reading thread closes the descriptor of a broken connection. When another thread closed it, the reader
    polled the number after the next socket had taken it, and the call waited for its whole deadline."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, _BrokenBeforePoll(fileno=ours.detach()) as sock:
        channel = Channel(sock, Path("scripted"), lambda: None)
        sock.channel = channel
        with pytest.raises(Unreachable):
            channel.call(engine.Heartbeat, PATIENT_S)
        assert sock.same_descriptor
        assert sock.fileno() == -1, "the descriptor is closed after the call"


def _call(acts: Iterable[Callable[[], object]]) -> None:
    """Call each act, whose refusals are expected."""
    for act in acts:
        with contextlib.suppress(DeadlinePassed):
            act()


def test_no_message_waits_for_a_daemon_that_reads_nothing() -> None:
    """More messages without a reply than the socket and the client's own buffer take: the further ones are refused and
    counted. When the daemon reads again it gets each of the others as a whole, and in their order."""
    with scripted_link() as (link, daemon):
        channel = link.channel
        hints = [engine.MarkInFlight(bytes(32 * 1024), float(number)) for number in range(256)]
        # A message that waited would wait for ever: the daemon reads nothing until all were sent.
        _call(functools.partial(channel.tell, each) for each in hints)
        assert not channel.broken
        assert 0 < channel.refused_messages < len(hints)
        got: list[engine.EngineRequest] = []

        def read_on() -> bool:
            got.extend(daemon.received())
            channel.flush()
            return len(got) == len(hints) - channel.refused_messages

        wait_until(read_on, "the daemon has all that was not refused")
        assert got == hints[: len(got)]
        channel.tell(engine.Bye())
        assert daemon.received() == [engine.Bye()]


def test_a_reply_just_before_its_caller_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread reads, because its own reply takes longer."""
    with scripted_link() as (link, daemon), ThreadPoolExecutor(1) as other:
        channel = link.channel
        slow, pending = channel.begin(engine.Heartbeat), channel.begin(engine.Heartbeat)
        reading = other.submit(channel.poll, slow, LIMIT_S)
        caller, calls = threading.current_thread(), itertools.count()

        def monotonic() -> float:
            # The first time is the beginning of the wait. The second one is between the look at the reply and the wait.
            if threading.current_thread() is caller and next(calls) == 1:
                daemon.send(engine.HeartbeatReply(2, True))
                wait_until(lambda: pending.done, "the other thread has read the reply")
            return time.monotonic()

        monkeypatch.setattr("tokenlake_client.shared_socket.time", SimpleNamespace(monotonic=monotonic))
        # If the reply were not noticed, the caller would wait for this long, and the test would not end.
        assert channel.poll(pending, 10 * LIMIT_S) == engine.HeartbeatReply(2, True)
        daemon.send(engine.HeartbeatReply(1, True))
        assert reading.result() is not None


def test_a_write_in_a_frozen_daemon_is_given_back(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    prompt = Prompt(6, 4)
    with cluster.connect(0, LAYOUT) as pool:
        keys = pool.prefix(prompt.tokens).keys
        write = pool.store(keys)
        node.freeze()
        with pytest.raises(DeadlinePassed):
            pool.store(pool.prefix(Prompt(7, 4).tokens).keys)
        write.abort()
        node.thaw()
        wait_until(lambda: answers(pool), "it answers again")
        # The write that was aborted meanwhile, and the write whose grant arrived late, were both given back.
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert outcomes(store(pool, Prompt(7, 4))) == {Code.COMMITTED}
        assert total(node, "tokenlake_quarantined_slots") == 0
