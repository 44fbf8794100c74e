"""Orders of operators that outlive the daemon: what is kept, in which files, and what a damaged file costs."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import pytest

from tests.robustness.live import LAYOUT, PATIENT, Prompt, match, store, total, wait_until
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


async def saved(orders: StandingOrders) -> list[str]:
    return await orders.save()


async def test_orders_outlive_the_daemon(tmp_path: Path) -> None:
    home = tmp_path / "orders"
    orders = orders_of(home)
    orders.retire("red", "w1")
    assert await saved(orders) == []
    again = orders_of(home)
    assert again.is_retired("red", "w1")
    assert not again.is_retired("blue", "w1")
    assert home.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("copy", [0, COPY_BYTES])
async def test_one_damaged_copy_costs_nothing(copy: int, tmp_path: Path) -> None:
    orders = orders_of(tmp_path / "orders")
    orders.retire("red", "w1")
    await saved(orders)
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
    await saved(orders)
    before = home.read_bytes()
    orders.retire("red", "w2")
    await saved(orders)
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
    assert await saved(orders) == []
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
    await saved(orders)
    assert orders.clean(str(one))
    assert orders.clean(str(two))
    orders.evict([str(one)])
    orders.evict()
    await saved(orders)
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
    await saved(orders_of(tmp_path / "home", disk))
    disk.rename(away)
    orders = orders_of(tmp_path / "home", disk)
    orders.evict()
    assert [str(disk / "orders") in each for each in await saved(orders)] == [True]
    for path in (disk, tmp_path / "moved"):
        away.rename(path)
        orders = orders_of(tmp_path / "home", path)
        orders.take(str(path))
        assert not orders.clean(str(path))
        path.rename(away)


async def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    orders = orders_of(tmp_path / "missing" / "orders", tmp_path)
    orders.retire("red", "w1")
    (problem,) = await saved(orders)
    assert problem == f"{tmp_path / 'missing' / 'orders'}: No such file or directory"
    assert orders_of(tmp_path / "orders").is_retired("red", "w1")


@pytest.mark.parametrize("link", [os.symlink, os.link])
async def test_a_link_is_no_file_of_orders(link: object, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    assert callable(link)
    link(tmp_path / "victim", tmp_path / "orders")
    orders = orders_of(tmp_path / "orders")
    orders.retire("red", "w1")
    assert len(await saved(orders)) == 1
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
async def test_a_file_of_another_user_is_not_used(tmp_path: Path) -> None:
    orders_of(tmp_path / "orders")
    os.chown(tmp_path / "orders", 65534, 65534)
    orders = orders_of(tmp_path / "orders")
    assert await saved(orders) == [f"{tmp_path / 'orders'}: it belongs to another user"]


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
    assert await saved(orders) == []


# -- with daemons


@pytest.mark.live
@pytest.mark.parametrize("disk", [False, True])
def test_retired_weights_do_not_return(disk: bool, tmp_path: Path) -> None:
    """Neither for an engine that was connected, nor with the segments on disk; also right behind the answer."""
    pytest.importorskip("grpc")
    from tests.server.control.scene import local

    settings = {"disk": f"{tmp_path}:64MiB"} if disk else {}
    with Cluster(1, "8MiB", "1MiB", **settings) as cluster:
        cluster.deadlines, node, prompt = PATIENT, cluster.nodes[0], Prompt(1, 8)
        if disk:
            node.wait_disk()
        stale = cluster.connect(0, LAYOUT)
        store(stale, prompt)
        with local(node) as control:
            answer = control.weights_changed(LAYOUT.weights_digest)
            assert (answer.sessions, answer.evicted) == (1, 8)
            assert not answer.unrecorded
            assert not answer.unremoved
        node.kill()
        node.start()
        cluster.wait_ready()
        with pytest.raises(TokenLakeError):
            store(stale, prompt)
        with pytest.raises(LayoutRefused, match="changed in place"):
            Pool.connect(node.socket, LAYOUT, deadlines=PATIENT)
        stale.close()


@pytest.mark.live
def test_segments_evicted_from_a_disk_do_not_return(tmp_path: Path) -> None:
    pytest.importorskip("grpc")
    from tests.server.control.scene import local

    with Cluster(1, "8MiB", "1MiB", disk=f"{tmp_path}:64MiB") as cluster:
        cluster.deadlines, node, prompt = PATIENT, cluster.nodes[0], Prompt(1, 8)
        node.wait_disk()
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, prompt)
        node.stop()
        node.start()
        cluster.wait_ready()
        node.wait_disk()
        with local(node) as control:
            assert control.evict(everything=True).evicted == 8
        node.kill()
        node.start()
        cluster.wait_ready()
        node.wait_disk()
        with cluster.connect(0, LAYOUT) as pool, match(pool, prompt, 2.0) as lease:
            assert lease.hits == 0


@pytest.mark.live
def test_evictions_wait_for_a_disk_that_is_aside(tmp_path: Path) -> None:
    """The answer names the device, and a later daemon does not find the segments there."""
    pytest.importorskip("grpc")
    from tests.server.control.scene import local

    with Cluster(1, "8MiB", "1MiB", disk=f"{tmp_path}:64MiB") as cluster:
        cluster.deadlines, node, prompt = PATIENT, cluster.nodes[0], Prompt(1, 8)
        node.wait_disk()
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, prompt)
        node.stop()
        identity = tmp_path / "tokenlake-disk.json"
        right = identity.read_bytes()
        found = msgspec.json.decode(right.partition(b"\n")[0], type=Identity)
        identity.write_bytes(pack_identity(msgspec.structs.replace(found, encrypted=True)))
        node.start()
        cluster.wait_ready()
        with local(node) as control:
            wait_until(lambda: bool(control.status().disks[0].problem), "the device is set aside")
            answer = control.evict(everything=True)
            (named,) = answer.unremoved
            assert named.startswith(f"{tmp_path}: its segments are encrypted")
            assert not answer.unrecorded
        assert total(node, "tokenlake_disk_waiting_removals") == 1
        node.kill()
        identity.write_bytes(right)
        node.start()
        cluster.wait_ready()
        node.wait_disk()
        with cluster.connect(0, LAYOUT) as pool, match(pool, prompt, 2.0) as lease:
            assert lease.hits == 0
        assert total(node, "tokenlake_disk_segments") == 0
        wait_until(lambda: total(node, "tokenlake_disk_waiting_removals") == 0, "nothing waits")


@pytest.mark.live
def test_segments_evicted_while_their_disk_is_away_are_gone(tmp_path: Path) -> None:
    """The disk leaves the setting, and comes back at another path."""
    pytest.importorskip("grpc")
    from tests.server.control.scene import local

    one, two, moved = (tmp_path / each for each in ("one", "two", "moved"))
    one.mkdir()
    two.mkdir()
    with Cluster(1, "8MiB", "1MiB", disk=f"{one}:64MiB") as cluster:
        cluster.deadlines, node, prompt = PATIENT, cluster.nodes[0], Prompt(1, 8)
        node.wait_disk()
        with cluster.connect(0, LAYOUT) as pool:
            store(pool, prompt)
        for disk in (two, moved):
            node.stop()
            node.settings["disk"] = f"{disk}:64MiB"
            node.start()
            cluster.wait_ready()
            node.wait_disk()
            if disk is two:
                with local(node) as control:
                    assert not control.evict(everything=True).unremoved
                one.rename(moved)
        wait_until(lambda: f"{moved} has" in node.log.read_text(), "the device was searched")
        with cluster.connect(0, LAYOUT) as pool, match(pool, prompt, 2.0) as lease:
            assert lease.hits == 0


@pytest.mark.live
def test_evicted_segments_do_not_return_with_their_key(tmp_path: Path) -> None:
    """The key of the setting `disk_keys` with which they are encrypted is away while an operator evicts them."""
    pytest.importorskip("grpc")
    from tests.server.control.scene import local

    file, disk = tmp_path / "settings.toml", tmp_path / "disk"
    disk.mkdir()
    file.touch(0o600)
    old, new = (f'"{os.urandom(32).hex()}"' for _ in range(2))
    file.write_text(f"disk_keys = [{old}]")
    with Cluster(1, "8MiB", "1MiB", disk=f"{disk}:64MiB", config=str(file)) as cluster:
        cluster.deadlines, node, prompt = PATIENT, cluster.nodes[0], Prompt(1, 3)
        for keys in ([new, old], [new], [new, old]):
            node.wait_disk()
            if keys == [new]:
                # The slab has segments of both keys.
                prompt = Prompt(2, 3)
            with cluster.connect(0, LAYOUT) as pool:
                store(pool, prompt)
            if keys == [new, old] and prompt.tokens == Prompt(2, 3).tokens:
                with local(node) as control:
                    control.evict(everything=True)
            node.stop()
            file.write_text(f"disk_keys = [{', '.join(keys)}]")
            node.start()
            cluster.wait_ready()
        node.wait_disk()
        with cluster.connect(0, LAYOUT) as pool, match(pool, Prompt(1, 3), 2.0) as lease:
            assert lease.hits == 0
