"""Refusals on the local socket name their reason, and the daemon continues to serve."""

from __future__ import annotations

import resource

import msgspec
import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, daemons, outcomes, pid_of, read, store
from tests.server.raw import Raw, hello, refusal
from tokenlake.errors import LayoutRefused, LimitReached
from tokenlake.identity import SessionId
from tokenlake.layout import Layout
from tokenlake.wire import Code, engine
from tokenlake_client import Pool
from tokenlake_testing.cluster import Cluster, Node

pytestmark = pytest.mark.live


def test_another_layout_in_the_same_session(node: Node, cluster: Cluster) -> None:
    other = Layout(**(msgspec.structs.asdict(LAYOUT) | {"layers": 3}))
    with cluster.connect(0, LAYOUT) as pool:
        with pytest.raises(LayoutRefused, match="'layers' is 3"):
            Pool.connect(node.socket, other, session=pool.engine.session, deadlines=PATIENT)
        same_size = Layout(**(msgspec.structs.asdict(LAYOUT) | {"weights_digest": "11"}))
        with pytest.raises(LayoutRefused, match="'weights_digest' is '11'"):
            Pool.connect(node.socket, same_size, session=pool.engine.session, deadlines=PATIENT)
        with pytest.raises(LimitReached, match="session 999999 does not exist"):
            Pool.connect(node.socket, LAYOUT, session=SessionId(999999), deadlines=PATIENT)
        with pytest.raises(LayoutRefused):
            Pool.connect(node.socket, Layout(**(msgspec.structs.asdict(LAYOUT) | {"dtype": "int3"})))


def test_large_frames_and_wrong_order_are_refused(node: Node) -> None:
    with Raw(node.socket) as raw:
        raw.write((1 << 31).to_bytes(4, "little") + b"x" * 64)
        failed = raw.failed()
        assert str(1 << 31) in failed.reason
        assert raw.closed()
    assert "must be Hello, not Match" in refusal(node.socket, engine.Match(1, b"", 0.1)).reason
    with Raw.joined(node.socket) as raw:
        raw.send(hello(id=2))
        failed = raw.failed()
        assert "twice" in failed.reason
    with Raw.joined(node.socket) as raw:
        raw.send(engine.Match(3, b"x" * 33, 0.1))
        failed = raw.failed()
        assert "33 bytes" in failed.reason


def test_leases_and_writes_of_other_sessions_are_refused(node: Node, cluster: Cluster) -> None:
    prompt = Prompt(77, 3)
    with cluster.connect(0, LAYOUT) as pool, Raw(node.socket) as raw:
        store(pool, prompt)
        keys = pool.prefix(prompt.tokens).keys
        lease = pool.match(keys)
        write = pool.store(pool.prefix(Prompt(78, 2).tokens).keys)
        raw.send(hello())
        raw.reply()
        raw.send(engine.Release(((lease.ids[0], 0, 3),)))
        raw.send(engine.Abort(write.id))
        raw.send(engine.Commit(2, write.id, (0, 1), 3, bytes(32)))
        committed = raw.reply()
        assert isinstance(committed, engine.Committed)
        assert outcomes(committed.codes) == {Code.EXPIRED}
        raw.send(engine.Fetch(3, lease.ids[0], 0, 3, 0.1))
        fetched = raw.reply()
        assert isinstance(fetched, engine.Fetched)
        assert outcomes(fetched.codes) == {Code.LOST}
        raw.send(engine.Attach(4, lease.ids[0]))
        attached = raw.reply()
        assert isinstance(attached, engine.Matched)
        assert attached.hits == 0
        raw.send(engine.OpenRegion(5, 4_000_000_000))
        failed = raw.failed()
        assert "region 4000000000" in failed.reason
        arrays = lease.fetch()
        assert prompt.wrong(arrays) == 0
        for index, array in write.slots:
            Prompt(78, 2).fill(index, array)
        assert outcomes(write.commit()) == {Code.COMMITTED}
        del arrays
        lease.release()


def test_a_daemon_without_free_descriptors_replies() -> None:
    """The daemon refuses the request. Without a reply, the engine would wait and take the daemon for frozen."""
    prompt = Prompt(1, 4)
    with daemons() as cluster, cluster.connect(0, LAYOUT) as pool:
        pid = pid_of(cluster.nodes[0])
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        with pytest.raises(LimitReached, match="OpenRegion now: Too many open files"):
            pool.store(pool.prefix(prompt.tokens).keys)
        assert pool.engine.timeouts == 0
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
        assert read(pool, prompt) == 4
