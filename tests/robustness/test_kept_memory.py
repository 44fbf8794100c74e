"""Memory that outlives its daemon: restarts in order and by SIGKILL, at a keeper and at a service manager, with engines
that read, write, are frozen and die meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.robustness.descriptor_store import SERVICE, StandIn, descriptor_store
from tests.robustness.dying_daemon import AT_THE_END, PHASES
from tests.robustness.live import (
    LAYOUT,
    PATIENT,
    EngineProcess,
    Prompt,
    accounted,
    match,
    outcomes,
    pid_of,
    read,
    store,
    total,
    wait_until,
)
from tests.server.scene import BLUE, RED, tenants
from tokenlake.errors import TokenLakeError
from tokenlake.wire import Code
from tokenlake_client import Pool
from tokenlake_server import keeper
from tokenlake_testing import fork_server
from tokenlake_testing.cluster import SERVER, Cluster, Node

pytestmark = pytest.mark.live

KEEP = {"keep_s": "600"}
SEGMENTS, PROMPTS = 6, 10
HOW = ("in order", "killed")


def kept_by(name: str, **settings: str) -> Cluster:
    """One node, whose memory the keeper or the service manager keeps."""
    module = SERVICE if name == "service manager" else SERVER
    keep = {} if name == "service manager" else KEEP
    cluster = Cluster(1, "4MiB", "1MiB", None, module, **{"match_deadline_ms": "2000", **keep, **settings})
    cluster.deadlines = PATIENT
    return cluster


@pytest.fixture(params=["keeper", "service manager"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A daemon with each store."""
    if request.param == "keeper":
        with kept_by("keeper") as cluster:
            yield cluster
        return
    with fork_server.executed(), descriptor_store(tmp_path), kept_by("service manager") as cluster:
        yield cluster


@pytest.fixture
def one() -> Iterator[Cluster]:
    """A daemon with a keeper."""
    with kept_by("keeper") as cluster:
        yield cluster


def end(node: Node, how: str) -> None:
    """End the daemon of a node."""
    if how == "killed":
        node.kill()
    else:
        assert node.stop() == 0


def begin(running: Cluster, /, **settings: str) -> None:
    """Start it again, and wait until all that was kept is served."""
    node = running.nodes[0]
    node.start(**settings)
    running.wait_ready()
    wait_until(lambda: not total(node, "tokenlake_unchecked_segments"), "all segments are checked")


def fill(pool: Pool, count: int = PROMPTS, first: int = 0) -> list[Prompt]:
    prompts = [Prompt(first + seed, SEGMENTS) for seed in range(count)]
    for prompt in prompts:
        assert outcomes(store(pool, prompt)) == {Code.COMMITTED}
    return prompts


def found(pool: Pool, prompts: list[Prompt]) -> int:
    """The segments that are found here; their bytes are compared."""
    return sum(read(pool, prompt) for prompt in prompts)


def back(pool: Pool) -> None:
    wait_until(lambda: pool.connected, "connected again")


@pytest.mark.parametrize("how", HOW)
def test_all_segments_are_found_again(cluster: Cluster, how: str) -> None:
    node = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
    for turn in range(1, 3):
        segments = total(node, "tokenlake_segments")
        end(node, how)
        begin(cluster)
        assert total(node, "tokenlake_kept_segments_total") == segments
        with cluster.connect(0, LAYOUT) as pool:
            assert found(pool, prompts) == SEGMENTS * PROMPTS
            # New segments get the other slots, and then those of kept segments.
            new = fill(pool, 60, first=1000 * turn)[-PROMPTS:]
            assert found(pool, prompts) < SEGMENTS * PROMPTS
            assert found(pool, new) == SEGMENTS * PROMPTS
            prompts = new
        wait_until(lambda: accounted(node), "every slot is free or has a segment")


@pytest.mark.parametrize("how", HOW)
def test_leases_views_and_writes_go_on(cluster: Cluster, how: str) -> None:
    node = cluster.nodes[0]
    with cluster.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
        lease = match(pool, prompts[0])
        arrays = lease.fetch()
        addresses = [array.ctypes.data for array in arrays]
        write = pool.store(pool.prefix(Prompt(77, 2).tokens).keys)
        secret = pool.link.secret
        for _ in range(3):
            end(node, how)
            assert prompts[0].wrong(arrays) == 0, "no daemon runs"
            begin(cluster)
            back(pool)
            assert pool.link.secret == secret
            wait_until(lambda: total(node, "tokenlake_survivors") == 0, "the engine has returned")
            # The whole memory is written anew: leased and reserved slots are not.
            for seed in range(60):
                store(pool, Prompt(5000 + seed, SEGMENTS))
            assert prompts[0].wrong(arrays) == 0
            again = lease.fetch()
            assert [array.ctypes.data for array in again] == addresses, "the same memory, mapped once"
            del again
        for index, array in write.slots:
            Prompt(77, 2).fill(index, array)
        del array
        assert set(write.commit()) == {Code.EXPIRED}
        assert read(pool, prompts[0]) == SEGMENTS, "what is leased stays"
        assert read(pool, Prompt(77, 2)) == 0
        lease.release()
        del arrays, write
        wait_until(lambda: accounted(node), "every slot is free or has a segment")


@pytest.mark.parametrize("how", HOW)
def test_a_frozen_engine_blocks_its_tenant_alone(how: str, tmp_path: Path) -> None:
    with kept_by("keeper", config=tenants(tmp_path)) as cluster:
        node = cluster.nodes[0]
        red, blue = Prompt(1, SEGMENTS), Prompt(2, SEGMENTS)

        def connect(token: str) -> Pool:
            return Pool.connect(node.socket, LAYOUT, token, deadlines=PATIENT)

        with EngineProcess(node.socket, credential=RED) as engine:
            engine.ask("store", seed=1, segments=SEGMENTS)
            assert engine.ask("match", seed=1, segments=SEGMENTS)["hits"] == SEGMENTS
            engine.ask("prepare", seed=9, segments=3)
            with connect(BLUE) as pool:
                assert outcomes(store(pool, blue)) == {Code.COMMITTED}
            engine.freeze()
            end(node, how)
            begin(cluster)
            assert total(node, "tokenlake_survivors") == 1
            with connect(RED) as pool, connect(BLUE) as other:
                assert read(pool, red) == SEGMENTS, "kept segments are read"
                assert read(other, blue) == SEGMENTS
                wait_until(lambda: withheld(node, "blue") == 0, "nothing of the other tenant is blocked")
                blocked = withheld(node, "red")
                assert blocked > 0
                store(pool, Prompt(3, 200), patience=0.0)
                assert withheld(node, "red") == blocked, "no slot that the engine may use was given out"
                assert read(pool, red) == SEGMENTS, "nor evicted"
                engine.thaw()
                assert engine.ask("compare") == {"wrong": 0, "hits": SEGMENTS}
                wait_until(lambda: total(node, "tokenlake_survivors") == 0, "it has returned")
                returned(engine)
                engine.ask("fill")
                assert set(engine.ask("commit")["codes"]) == {Code.EXPIRED}
                wait_until(lambda: withheld(node, "red") == 0, "its memory is free for others")
                assert engine.ask("match", seed=1, segments=SEGMENTS)["wrong"] == 0


def returned(engine: EngineProcess) -> None:
    wait_until(lambda: bool(engine.ask("state")["connected"]), "connected again")


def withheld(node: Node, tenant: str) -> float:
    return node.metrics().get(f'tokenlake_withheld_slots{{tenant="{tenant}"}}', 0.0)


@pytest.mark.parametrize("when", ["while no daemon runs", "behind the start", "frozen"])
def test_an_engine_that_dies_blocks_nothing(one: Cluster, when: str) -> None:
    node = one.nodes[0]
    with EngineProcess(node.socket) as engine:
        engine.ask("store", seed=1, segments=SEGMENTS)
        engine.ask("match", seed=1, segments=SEGMENTS)
        engine.ask("prepare", seed=9, segments=3)
        if when == "frozen":
            engine.freeze()
        node.kill()
        if when == "while no daemon runs":
            engine.kill()
        begin(one)
        engine.kill()
        wait_until(lambda: withheld(node, "default") == 0, "its memory is free for others")
        wait_until(lambda: total(node, "tokenlake_survivors") == 0, "no survivor is left")
    with one.connect(0, LAYOUT) as pool:
        assert read(pool, Prompt(1, SEGMENTS)) == SEGMENTS
        fill(pool, 20, first=100)
    wait_until(lambda: accounted(node), "every slot is free or has a segment")


@pytest.mark.parametrize("how", ["killed", "killed twice"])
def test_wrong_bytes_are_found(one: Cluster, how: str) -> None:
    """Between crash and restart a bit of every second segment flips."""
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
        flipped = []
        for prompt in prompts:
            with match(pool, prompt) as lease:
                place = lease.places[3]
                flipped.append(pool.link.regions.get(int(place["region"]), write=True).slots[place["slot"]])
        node.kill()
        for slot in flipped:
            slot[len(slot) // 3] ^= np.uint8(4)
        del slot, flipped
        if how == "killed twice":
            node.start("tests.robustness.dying_daemon", **{"die-at": "first segments"})
            assert node.process is not None
            assert node.process.wait(30) == -signal.SIGKILL
        begin(one)
        back(pool)
        assert [read(pool, prompt) for prompt in prompts] == [3] * PROMPTS
        if how == "killed":
            assert f"{PROMPTS} were wrong" in node.log.read_text()
        for prompt in prompts:
            store(pool, prompt)
        assert found(pool, prompts) == SEGMENTS * PROMPTS


def test_a_write_that_was_under_way_is_a_miss(one: Cluster) -> None:
    node = one.nodes[0]
    with EngineProcess(node.socket) as engine:
        engine.ask("prepare", seed=9, segments=3)
        engine.ask("fill")
        node.kill()
        begin(one)
        wait_until(lambda: total(node, "tokenlake_survivors") == 0, "it has returned")
        returned(engine)
        assert set(engine.ask("commit")["codes"]) == {Code.EXPIRED}
        with one.connect(0, LAYOUT) as pool:
            assert read(pool, Prompt(9, 3)) == 0
            assert outcomes(store(pool, Prompt(9, 3))) == {Code.COMMITTED}
            assert read(pool, Prompt(9, 3)) == 3


DIFFERENT: dict[str, tuple[dict[str, str], str]] = {
    "cluster": ({"cluster": "other"}, "this is node node0 of cluster other"),
    "node": ({"node": "other"}, "this is node other"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_daemon_of_another_node_or_cluster_starts_empty(one: Cluster, what: str) -> None:
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
    node.stop()
    settings, reason = DIFFERENT[what]
    begin(one, peers="", **settings)
    assert reason in node.log.read_text()
    with one.connect(0, LAYOUT) as pool:
        assert found(pool, prompts) == 0
        fill(pool)
    assert total(node, "tokenlake_memory_bytes") == 4 << 20


def test_smaller_and_larger_memory(one: Cluster) -> None:
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool:
        prompts = fill(pool, 36)
    node.stop()
    begin(one, memory="2MiB")
    assert "because of the setting 'memory', which is 2MiB now" in node.log.read_text()
    assert total(node, "tokenlake_memory_bytes") == 2 << 20
    with one.connect(0, LAYOUT) as pool:
        left = found(pool, prompts)
        assert 100 <= left < 36 * SEGMENTS
    node.kill()
    begin(one, memory="8MiB")
    with one.connect(0, LAYOUT) as pool:
        assert found(pool, prompts) == left
        fill(pool, 40, first=100)
    assert total(node, "tokenlake_memory_bytes") == 8 << 20


@pytest.mark.parametrize("change", ["left out", "another secret"])
def test_memory_of_a_tenant_that_is_gone(change: str, tmp_path: Path) -> None:
    with kept_by("keeper", config=tenants(tmp_path)) as cluster:
        node = cluster.nodes[0]
        with Pool.connect(node.socket, LAYOUT, RED, deadlines=PATIENT) as pool:
            fill(pool, 3)
        with Pool.connect(node.socket, LAYOUT, BLUE, deadlines=PATIENT) as other:
            prompts = fill(other, 3)
        node.stop()
        file = tmp_path / "tokenlake.toml"
        text = file.read_text()
        if change == "left out":
            at = text.index("[[tenants]]")
            text = text[:at] + text[text.index("[[tenants]]", at + 1) :]
        else:
            text = text.replace("aa" * 32, "ab" * 32)
        file.write_text(text)
        begin(cluster)
        assert "1 regions of the daemon before are not kept, because of tenant 'red'" in node.log.read_text()
        with Pool.connect(node.socket, LAYOUT, BLUE, deadlines=PATIENT) as other:
            assert found(other, prompts) == 3 * SEGMENTS


def test_another_format_starts_empty(one: Cluster) -> None:
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
    node.stop()
    with held(node) as descriptors:
        (name,) = (each for each in descriptors if each.startswith("ledger-"))
        os.pwrite(descriptors[name], b"\x09", 8)
    begin(one)
    assert "starts empty" in node.log.read_text()
    assert "has the format 9" in node.log.read_text()
    with one.connect(0, LAYOUT) as pool:
        assert found(pool, prompts) == 0
        fill(pool)


@contextlib.contextmanager
def held(node: Node) -> Iterator[dict[str, int]]:
    """The descriptors that the keeper of a node has, while no daemon runs."""
    sock = keeper.connect(str(node.socket).replace(".sock", ".keeper"))
    assert sock is not None
    with sock:
        assert keeper.receive(sock)[0] == b"keeper"
        sock.send(keeper.packet(b"keep", b"600"))
        sock.send(keeper.packet(b"take"))
        found: dict[str, int] = {}
        while (packet := keeper.receive(sock))[0] == b"held":
            assert packet[2] is not None
            found[packet[1].decode()] = packet[2]
        try:
            yield found
        finally:
            for number in found.values():
                os.close(number)


@pytest.mark.parametrize("phase", PHASES)
def test_killed_in_each_phase(one: Cluster, phase: str) -> None:
    """The next start finds all segments, or says that it starts empty; an engine that reads stays right."""
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool, EngineProcess(node.socket) as engine:
        prompts = fill(pool)
        assert engine.ask("match", seed=0, segments=SEGMENTS)["hits"] == SEGMENTS
        engine.ask("prepare", seed=99, segments=2)
        lease = match(pool, prompts[1])
        arrays = lease.fetch()
        node.kill()
        node.start("tests.robustness.dying_daemon", **{"die-at": phase, "memory": "6MiB"})
        assert node.process is not None
        if phase in AT_THE_END:
            one.wait_ready()
            back(pool)
            node.terminate()
        if phase == "a region is cut":
            with contextlib.suppress(TokenLakeError):
                back(pool)
                for seed in range(60):
                    store(pool, Prompt(500 + seed, SEGMENTS), patience=0.0)
        if phase == "a lock is made":
            one.wait_ready()
            with contextlib.suppress(TokenLakeError):
                Pool.connect(node.socket, LAYOUT)
        status = node.process.wait(60)
        assert status == -signal.SIGKILL
        begin(one)
        back(pool)
        assert prompts[1].wrong(arrays) == 0
        assert engine.ask("compare") == {"wrong": 0, "hits": SEGMENTS}
        if phase not in ("a region is cut",):
            assert found(pool, prompts) == SEGMENTS * PROMPTS
        wait_until(lambda: total(node, "tokenlake_survivors") == 0, "all engines are back")
        for seed in range(60):
            store(pool, Prompt(700 + seed, SEGMENTS))
        assert prompts[1].wrong(arrays) == 0
        assert engine.ask("compare") == {"wrong": 0, "hits": SEGMENTS}
        engine.ask("release")
        lease.release()
        del arrays


def test_another_keeper_gets_everything(one: Cluster) -> None:
    """The keeper is killed while the daemon runs."""
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
        lease = match(pool, prompts[0])
        arrays = lease.fetch()
        os.kill(keeper_pid(node), signal.SIGKILL)
        wait_until(lambda: "another keeper holds" in node.log.read_text(), "it was replaced")
        node.kill()
        begin(one)
        back(pool)
        assert found(pool, prompts) == SEGMENTS * PROMPTS
        assert prompts[0].wrong(arrays) == 0
        lease.release()


def test_keeper_and_daemon_are_killed(one: Cluster) -> None:
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
        lease = match(pool, prompts[0])
        arrays = lease.fetch()
        os.kill(keeper_pid(node), signal.SIGKILL)
        node.kill()
        begin(one)
        back(pool)
        assert found(pool, prompts) == 0
        assert prompts[0].wrong(arrays) == 0
        fill(pool, 20, first=50)
        assert prompts[0].wrong(arrays) == 0


def keeper_pid(node: Node) -> int:
    """The keeper of a node: the process that listens at its path."""
    path = str(node.socket).replace(".sock", ".keeper")
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (directory / "cmdline").read_bytes().split(b"\0")
            if path.encode() in words and b"--listening" in words:
                return int(directory.name)
    raise AssertionError("no keeper")


def test_a_daemon_that_keeps_nothing_ends_the_keeper(one: Cluster) -> None:
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
    node.stop()
    node.settings.pop("keep-s")
    begin(one)
    wait_until(lambda: not Path(str(node.socket).replace(".sock", ".keeper")).exists(), "the keeper has ended")
    with one.connect(0, LAYOUT) as pool:
        assert found(pool, prompts) == 0
    assert node.stop() == 0


def test_an_engine_of_the_version_before(one: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows nothing of memory that is kept: its arrays stay right, and it opens its regions anew."""
    for module in ("link", "channel"):
        monkeypatch.setattr(f"tokenlake_client.{module}.PROTOCOL_VERSION", 1, raising=False)
    node = one.nodes[0]
    with one.connect(0, LAYOUT) as pool:
        prompts = fill(pool)
        arrays = match(pool, prompts[0]).fetch()
        node.kill()
        begin(one)
        back(pool)
        assert not pool.link.kept
        assert found(pool, prompts) == SEGMENTS * PROMPTS
        assert prompts[0].wrong(arrays) == 0
        wait_until(lambda: total(node, "tokenlake_survivors") == 0, "it maps nothing of the daemon before")
        fill(pool, 40, first=50)
        assert prompts[0].wrong(arrays) == 0


def test_the_store_of_the_service_manager_has_a_limit(tmp_path: Path) -> None:
    """What it has no room for is not kept; locks come first."""
    with fork_server.executed(), descriptor_store(tmp_path, most=258) as kept, kept_by("service manager") as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as pool:
            prompts = fill(pool, 36)
            assert kept.refused == 0
        assert regions(kept) == 1
        node.kill()
        begin(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            assert 0 < found(pool, prompts) < 36 * SEGMENTS
            fill(pool, 20, first=100)


def test_a_store_that_is_smaller_than_it_says(tmp_path: Path) -> None:
    """The files that engines lock are lost without a word: the next daemon does not trust the memory."""
    with fork_server.executed(), descriptor_store(tmp_path, most=7), contextlib.ExitStack() as stack:
        os.environ["FDSTORE"] = "1000"
        cluster = stack.enter_context(kept_by("service manager"))
        node = cluster.nodes[0]
        # Engines of their own: a process that closes a descriptor of a file, as the stand-in does, lets go of its lock.
        engines = [stack.enter_context(EngineProcess(node.socket)) for _ in range(4)]
        engines[0].ask("store", seed=1, segments=SEGMENTS)
        for engine in engines:
            assert engine.ask("match", seed=1, segments=SEGMENTS)["hits"] == SEGMENTS
        node.kill()
        begin(cluster)
        assert "of the files that engines have locked are missing" in node.log.read_text()
        for seed in range(40):
            with contextlib.suppress(AssertionError):
                engines[3].ask("store", seed=100 + seed, segments=SEGMENTS)
        returned(engines[3])
        engines[3].ask("store", seed=200, segments=SEGMENTS)
        assert [engine.ask("compare") for engine in engines] == [{"wrong": 0, "hits": SEGMENTS}] * 4


def regions(kept: StandIn) -> int:
    return sum(name.startswith("region-") for name in kept.names)


def test_the_service_manager_drops_everything(tmp_path: Path) -> None:
    """As `systemctl stop` does."""
    with fork_server.executed(), descriptor_store(tmp_path) as kept, kept_by("service manager") as cluster:
        node = cluster.nodes[0]
        with cluster.connect(0, LAYOUT) as pool:
            prompts = fill(pool)
        assert regions(kept) == 4
        node.stop()
        kept.drop()
        begin(cluster)
        with cluster.connect(0, LAYOUT) as pool:
            assert found(pool, prompts) == 0
            fill(pool)
        assert pid_of(node)
