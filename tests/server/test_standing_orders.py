"""Orders of operators that outlive the daemon: what is kept, in which files, and what a damaged file costs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, match, store, total, wait_until
from tests.server.control.scene import local
from tests.server.scene import private
from tokenlake.errors import LayoutRefused, TokenLakeError
from tokenlake_client import Pool
from tokenlake_server.disk.directory import Identity, pack_identity
from tokenlake_server.start.standing_orders import COPY_BYTES, MAX_ALL_RETIRED, MAX_RETIRED, StandingOrders
from tokenlake_testing.cluster import Cluster


def orders_of(*places: Path, tenants: int = 1) -> StandingOrders:
    """The orders in a file, and in directories of the disk tier."""
    home, *directories = places
    orders = StandingOrders(home, [str(each) for each in directories], tenants)
    orders.load()
    return orders


async def test_orders_outlive_the_daemon(tmp_path: Path) -> None:
    home = tmp_path / "orders"
    orders = orders_of(home)
    orders.retire("red", "w1")
    assert await orders.save() == []
    again = orders_of(home)
    assert again.is_retired("red", "w1")
    assert not again.is_retired("blue", "w1")
    assert home.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("copy", [0, COPY_BYTES])
async def test_one_damaged_copy_costs_nothing(copy: int, tmp_path: Path) -> None:
    orders = orders_of(tmp_path / "orders")
    orders.retire("red", "w1")
    await orders.save()
    data = bytearray((tmp_path / "orders").read_bytes())
    for at in (0, 9, 30, 60):
        data[copy + at] ^= 1
        (tmp_path / "orders").write_bytes(data)
        assert orders_of(tmp_path / "orders").is_retired("red", "w1")
        data[copy + at] ^= 1


async def test_a_write_that_is_cut_off_leaves_one_version(tmp_path: Path) -> None:
    home = tmp_path / "orders"
    orders = orders_of(home)
    orders.retire("red", "w1")
    await orders.save()
    before = home.read_bytes()
    orders.retire("red", "w2")
    await orders.save()
    after = home.read_bytes()
    chance = random.Random(0)
    for _ in range(50):
        # The first copy is written and synced before the second one.
        end = chance.randint(0, len(after))
        home.write_bytes(after[:end] + before[end:])
        assert orders_of(home).is_retired("red", "w1")


async def test_each_place_is_enough(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for each in (one, two):
        each.mkdir()
    orders = orders_of(tmp_path / "home", one, two)
    orders.retire("red", "w1")
    assert await orders.save() == []
    for kept in (tmp_path / "home", one / "orders", two / "orders"):
        assert orders_of(kept).is_retired("red", "w1")
    (tmp_path / "home").unlink()
    (two / "orders").unlink()
    assert orders_of(tmp_path / "home", one, two).is_retired("red", "w1")


@pytest.mark.parametrize("lost", [(), ("home",), ("one/orders",), ("two/orders",)])
async def test_a_disk_that_missed_an_eviction_is_known(lost: tuple[str, ...], tmp_path: Path) -> None:
    """Wherever the orders are lost but at all disks that have carried it out."""
    home, one, two = (tmp_path / each for each in ("home", "one", "two"))
    for each in (one, two):
        each.mkdir()
    orders = orders_of(home, one, two)
    await orders.save()
    assert orders.clean(str(one))
    assert orders.clean(str(two))
    orders.evict([str(one)])
    orders.evict()
    await orders.save()
    for name in lost:
        (tmp_path / name).unlink()
    orders = orders_of(home, one, two)
    assert not orders.clean(str(one))
    assert orders.clean(str(two)) == ("two/orders" not in lost)
    assert [level.value for level in orders.gauges()[1:]] == [True, not orders.clean(str(two))]


async def test_a_disk_that_is_emptied_is_clean(tmp_path: Path) -> None:
    orders = orders_of(tmp_path / "home", tmp_path)
    orders.evict([str(tmp_path)])
    before = orders.evicted
    orders.cleaned(str(tmp_path), before)
    assert orders.clean(str(tmp_path))
    orders.evict([str(tmp_path)])
    orders.cleaned(str(tmp_path), before)  # it was emptied before the last eviction
    assert not orders.clean(str(tmp_path))


async def test_a_disk_that_was_away_missed_evictions(tmp_path: Path) -> None:
    """It left the setting, or did not answer when the daemon started, and comes back at its path or at another one."""
    disk, away = tmp_path / "disk", tmp_path / "away"
    disk.mkdir()
    await orders_of(tmp_path / "home", disk).save()
    disk.rename(away)
    orders = orders_of(tmp_path / "home", disk)
    orders.evict()
    assert [str(disk / "orders") in each for each in await orders.save()] == [True]
    for path in (disk, tmp_path / "moved"):
        away.rename(path)
        orders = orders_of(tmp_path / "home", path)
        orders.take(str(path))
        assert not orders.clean(str(path))
        path.rename(away)


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    orders = orders_of(tmp_path / "missing" / "orders", tmp_path)
    orders.retire("red", "w1")
    (problem,) = await orders.save()
    assert problem == f"{tmp_path / 'missing' / 'orders'}: No such file or directory"
    assert orders_of(tmp_path / "orders").is_retired("red", "w1")


@pytest.mark.parametrize("link", [os.symlink, os.link])
async def test_a_link_is_no_file_of_orders(link: object, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    assert callable(link)
    link(tmp_path / "victim", tmp_path / "orders")
    orders = orders_of(tmp_path / "orders")
    orders.retire("red", "w1")
    assert len(await orders.save()) == 1
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
async def test_a_file_of_another_user_is_not_used(tmp_path: Path) -> None:
    orders_of(tmp_path / "orders")
    os.chown(tmp_path / "orders", 65534, 65534)
    orders = orders_of(tmp_path / "orders")
    assert await orders.save() == [f"{tmp_path / 'orders'}: it belongs to another user"]


async def test_the_orders_have_limits(tmp_path: Path) -> None:
    orders = orders_of(tmp_path / "orders")
    for number in range(MAX_RETIRED + 1):
        orders.retire("red", str(number))
    assert not orders.is_retired("red", "0")
    assert orders.is_retired("red", "1")
    assert orders.gauges()[0].value == 1
    shared = orders_of(tmp_path / "shared", tenants=4096)
    for number in range(3):
        shared.retire("red", str(number))
    assert [shared.is_retired("red", str(number)) for number in range(3)] == [False, True, True]
    for number in range(MAX_ALL_RETIRED):
        orders.retire(str(number // MAX_RETIRED), str(number))
    assert await orders.save() == []


# -- with daemons


class Scene:
    """A daemon with a disk, and a prompt."""

    def __init__(self, cluster: Cluster) -> None:
        cluster.deadlines = PATIENT
        self.cluster, self.node, self.prompt = cluster, cluster.nodes[0], Prompt(1, 8)

    def store(self) -> None:
        with self.cluster.connect(0, LAYOUT) as pool:
            store(pool, self.prompt)

    def start(self, *, disk: bool = True) -> None:
        """Start the daemon again; `disk`: wait until its disk is in use."""
        self.node.start()
        self.cluster.wait_ready()
        if disk:
            self.node.wait_disk()

    def hits(self) -> int:
        with self.cluster.connect(0, LAYOUT) as pool, match(pool, self.prompt, 2.0) as lease:
            return lease.hits


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Cluster(1, "8MiB", "1MiB", disk=f"{tmp_path}:64MiB") as cluster:
        cluster.nodes[0].wait_disk()
        yield Scene(cluster)


@pytest.mark.live
def test_retired_weights_do_not_return(scene: Scene) -> None:
    """Neither for an engine that was connected, nor with the segments on disk; also right behind the answer."""
    stale = scene.cluster.connect(0, LAYOUT)
    store(stale, scene.prompt)
    with local(scene.node) as control:
        answer = control.weights_changed(LAYOUT.weights_digest)
        assert (answer.sessions, answer.evicted) == (1, 8)
        assert not answer.unrecorded
        assert not answer.unremoved
        assert control.weights_changed("another").sessions == 0
    scene.node.kill()
    scene.start(disk=False)
    with pytest.raises(TokenLakeError):
        store(stale, scene.prompt)
    with pytest.raises(LayoutRefused, match="changed in place"):
        Pool.connect(scene.node.socket, LAYOUT, deadlines=PATIENT)
    with local(scene.node) as control:
        # The sizes that belong to the weights are known although no engine is connected.
        assert control.weights_changed(LAYOUT.weights_digest).sessions == 0
    stale.close()


@pytest.mark.live
def test_segments_evicted_from_a_disk_do_not_return(scene: Scene) -> None:
    scene.store()
    scene.node.stop()
    scene.start()
    wait_until(lambda: total(scene.node, "tokenlake_disk_segments") == 8, "the segments on disk are found")
    with local(scene.node) as control:
        assert control.evict(everything=True).evicted == 8
    scene.node.kill()
    scene.start()
    assert scene.hits() == 0


@pytest.mark.live
def test_evictions_wait_for_a_disk_that_is_aside(scene: Scene, tmp_path: Path) -> None:
    """The answer names the device, and a later daemon does not find the segments there."""
    scene.store()
    scene.node.stop()
    identity = tmp_path / "tokenlake-disk.json"
    right = identity.read_bytes()
    found = msgspec.json.decode(right.partition(b"\n")[0], type=Identity)
    identity.write_bytes(pack_identity(msgspec.structs.replace(found, encrypted=True)))
    scene.start(disk=False)
    with local(scene.node) as control:
        wait_until(lambda: bool(control.status().disks[0].problem), "the device is set aside")
        answer = control.evict(everything=True)
        (named,) = answer.unremoved
        assert named.startswith(f"{tmp_path}: its segments are encrypted")
        assert not answer.unrecorded
    assert total(scene.node, "tokenlake_disk_waiting_removals") == 1
    scene.node.kill()
    identity.write_bytes(right)
    scene.start()
    assert scene.hits() == 0
    assert total(scene.node, "tokenlake_disk_segments") == 0
    wait_until(lambda: total(scene.node, "tokenlake_disk_waiting_removals") == 0, "nothing waits")


@pytest.mark.live
def test_evicted_segments_do_not_return_with_their_key(scene: Scene, tmp_path: Path) -> None:
    """The key of the setting `disk_keys` with which they are encrypted is away while an operator evicts them."""
    file, disk = tmp_path / "settings.toml", tmp_path / "disk"
    disk.mkdir()
    scene.node.settings |= {"config": private(file, ""), "disk": f"{disk}:64MiB"}
    old, new = (f'"{os.urandom(32).hex()}"' for _ in range(2))

    def restart(*keys: str) -> None:
        scene.node.stop()
        file.write_text(f"disk_keys = [{', '.join(keys)}]")
        scene.start()

    restart(old)
    scene.store()
    restart(new)
    with scene.cluster.connect(0, LAYOUT) as pool:
        store(pool, Prompt(2, 3))  # The slab has segments of both keys.
    with local(scene.node) as control:
        control.evict(everything=True)
    restart(new, old)
    assert scene.hits() == 0
