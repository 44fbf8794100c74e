"""Daemons with a cold tier: what one cluster computed, another one without a memory of it finds, byte by byte."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.robustness.live import LAYOUT, Prompt, daemons, read, total, wait_until
from tests.server.cold.bucket import BUCKET, needs_s3, of_server, s3_server
from tests.server.disk.test_live import store
from tokenlake_operator.evict import evict
from tokenlake_server.cold.command import cold
from tokenlake_testing.cluster import Cluster
from tokenlake_testing.event_log import replay

pytestmark = pytest.mark.live

SEGMENTS = 12
SECRET = "5e" * 32


def ready(cluster: Cluster) -> None:
    """Wait until the cold tier of each node serves, and takes segments."""
    for node in cluster.nodes:
        wait_until(lambda: total(node, "tokenlake_cold_writable") == 1, "the cold tier is in use")  # noqa: B023


def tenants(directory: Path, secret: str = SECRET) -> str:
    """A file with settings: one tenant."""
    file = directory / f"{secret[:4]}.toml"
    file.touch(0o600)
    tenant = f'[[tenants]]\nname = "default"\nsecret = "{secret}"\nuids = [{os.getuid()}]\n'
    file.write_text(f'cluster_secret = ["{"c5" * 32}"]\n{tenant}')
    return str(file)


def known(cluster: Cluster) -> int:
    """Objects that every node of a cluster knows."""
    return int(min(total(node, "tokenlake_cold_objects") for node in cluster.nodes))


def found(cluster: Cluster, prompts: list[Prompt], at: int = 0) -> int:
    """Read the prompts at one node, compare all bytes, and return the number of segments that were there."""
    with cluster.connect(at, LAYOUT) as pool:
        return sum(read(pool, prompt) for prompt in prompts)


def computed(cluster: Cluster, prompts: list[Prompt], at: int = 0) -> None:
    with cluster.connect(at, LAYOUT) as pool:
        for prompt in prompts:
            store(pool, prompt)


def stopped(cluster: Cluster) -> None:
    """End all daemons by SIGTERM, which lets them write what only their memory has."""
    for node in cluster.nodes:
        node.terminate()
    assert [node.stop(60) for node in cluster.nodes] == [0] * len(cluster.nodes)


def test_another_cluster_finds_what_one_computed(tmp_path: Path) -> None:
    """200 requests in a cluster; it ends. The next 200 in another one, of another name and size."""
    place = tmp_path / "cold"
    place.mkdir()
    prompts = [Prompt(seed, SEGMENTS) for seed in range(12)]
    chance = random.Random(1)
    requests = [chance.choice(prompts) for _ in range(200)]
    settings = {"cold": str(place), "config": tenants(tmp_path), "cold_size": "1GiB"}
    with daemons(2, cluster="first", **settings) as first:
        ready(first)
        before = 0
        for at, prompt in enumerate(requests):
            with first.connect(at % 2, LAYOUT) as pool:
                before += read(pool, prompt)
                store(pool, prompt)
        stopped(first)
    with daemons(3, cluster="second", **settings) as second:
        ready(second)
        health = json.loads(second.nodes[0].page("/health"))["cold"]
        assert (health["place"], health["serving"], health["problem"]) == (str(place), True, "")
        wait_until(lambda: known(second) >= SEGMENTS * len(prompts), "the index is read")
        after = sum(found(second, [prompt], at % 3) for at, prompt in enumerate(requests))
        assert after == SEGMENTS * len(requests), (before, after)
        assert after > before
        supplied = sum(total(node, "tokenlake_cold_read_segments_total") for node in second.nodes)
        assert supplied >= SEGMENTS * len(prompts)
    with daemons(1, cluster="third", **(settings | {"config": tenants(tmp_path, "ab" * 32)})) as third:
        ready(third)
        assert found(third, prompts) == 0
    data = b"".join(each.read_bytes() for each in place.rglob("*") if each.is_file())
    assert not any(prompt.content(0)[:64] in data for prompt in prompts)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "cold"
    path.mkdir()
    return path


def filled(cluster: Cluster, prompts: list[Prompt]) -> None:
    """Ask for prompts of which memory holds a part, again and again, until most are in the cold tier."""
    ready(cluster)

    def written() -> bool:
        found(cluster, prompts)
        computed(cluster, prompts)
        return total(cluster.nodes[0], "tokenlake_cold_written_segments_total") > SEGMENTS * len(prompts) / 2

    wait_until(written, "memory evicts into the cold tier")


def wait_journal(place: Path) -> None:
    """Wait until a journal names some objects. A file that has not got its name yet counts for nothing."""

    def sizes() -> list[int]:
        return [each.stat().st_size for each in place.glob("index/journal/[0-9a-f]*")]

    wait_until(lambda: max(sizes(), default=0) > 1000, "a journal is written")


def test_a_killed_daemon_left_what_it_had_evicted(place: Path) -> None:
    """Memory holds a third of the prompts."""
    prompts = [Prompt(seed, SEGMENTS) for seed in range(60)]
    with daemons(cold=str(place)) as one:
        filled(one, prompts)
        wait_journal(place)
        one.nodes[0].kill()
    objects = len(list(place.glob("objects/*/*")))
    assert objects > 100
    with daemons(cold=str(place)) as other:
        ready(other)
        # The journal of the last seconds was lost with the process: its objects are found by a scan only.
        wait_until(lambda: total(other.nodes[0], "tokenlake_cold_objects") > 0, "the index is read")
        assert total(other.nodes[0], "tokenlake_cold_objects") <= objects
        assert found(other, prompts) > 0


def test_an_operator_evicts_from_the_cold_tier(place: Path, tmp_path: Path) -> None:
    """The recorded events replay."""
    prompts = [Prompt(seed, SEGMENTS) for seed in range(60)]
    with daemons(cold=str(place), record=str(tmp_path / "events")) as cluster:
        filled(cluster, prompts)
        with cluster.connect(0, LAYOUT) as pool:
            keys = [key for prompt in prompts[:10] for key in pool.prefix(prompt.tokens).keys]
        at = ("--socket", str(cluster.nodes[0].socket).removesuffix(".sock") + ".control")
        before = len(list(place.glob("objects/*/*")))
        words = [word for key in keys for word in ("--segment", key.hex())]
        assert CliRunner().invoke(evict, [*words, *at]).exit_code == 0
        assert found(cluster, prompts[:10]) == 0
        wait_until(lambda: len(list(place.glob("objects/*/*"))) < before, "its objects are deleted")
        assert CliRunner().invoke(evict, ["--all", "--yes", *at]).exit_code == 0
        wait_until(lambda: not list(place.glob("objects/*/*")), "all objects are deleted")
        assert found(cluster, prompts) == 0
        stopped(cluster)
    assert not replay(tmp_path / "events").difference


def test_damage_is_a_miss_to_an_engine(place: Path) -> None:
    """All objects are damaged, each in its way; two daemons read them."""
    prompts = [Prompt(seed, SEGMENTS) for seed in range(40)]
    with daemons(cold=str(place)) as one:
        filled(one, prompts)
        stopped(one)
    chance = random.Random(5)
    paths = sorted(place.glob("objects/*/*"))
    for number, path in enumerate(paths):
        data = bytearray(path.read_bytes())
        match number % 5:
            case 0:
                data[chance.randrange(96)] ^= 1
            case 1:
                data[chance.randrange(5000, len(data))] ^= 1
            case 2:
                del data[chance.randrange(len(data)) :]
            case 3:
                data = bytearray(paths[number - 1].read_bytes())
            case 4:
                data = bytearray(os.urandom(len(data)))
        path.write_bytes(data)
    with daemons(2, cold=str(place)) as other:
        ready(other)
        assert found(other, prompts) + found(other, prompts, 1) == 0
        wait_until(lambda: sum(total(node, "tokenlake_cold_errors") for node in other.nodes) > 0, "damage is counted")
        computed(other, prompts[:3])
        assert found(other, prompts[:3]) == 3 * SEGMENTS


@pytest.mark.rest
@needs_s3
def test_daemons_outlive_their_bucket(tmp_path: Path) -> None:
    """The server of the bucket is stopped while a daemon reads from it, and the daemon goes on and ends in time."""
    prompts = [Prompt(seed, SEGMENTS) for seed in range(40)]
    with s3_server(tmp_path / "log") as bucket, of_server(bucket.variables):
        place = f"s3://{BUCKET}/live"
        with daemons(cold=place) as one:
            filled(one, prompts)
            stopped(one)
        with daemons(cold=place) as other:
            ready(other)
            some = found(other, prompts[:5])
            assert some > 0
            bucket.process.send_signal(signal.SIGSTOP)
            assert found(other, prompts[:5]) >= some
            found(other, prompts[20:22])
            computed(other, [Prompt(99, SEGMENTS)])
            assert found(other, [Prompt(99, SEGMENTS)]) == SEGMENTS
            wait_until(lambda: total(other.nodes[0], "tokenlake_cold_serving") == 0, "it is set aside", 60)
            assert other.nodes[0].stop(30) == 0
            bucket.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("/nowhere/at/all", "a directory that exists"),
        ("/etc/passwd", "a directory"),
        ("relative", "absolute path of a directory"),
        ("s3:/x", "absolute path of a directory"),
    ],
)
def test_a_place_that_cannot_be_one(place: str, text: str) -> None:
    with pytest.raises(Exception, match=text):
        daemons(cold=place).__enter__()


def test_the_commands_read_what_daemons_wrote(place: Path) -> None:
    prompts = [Prompt(seed, SEGMENTS) for seed in range(40)]
    with daemons(cold=str(place)) as one:
        filled(one, prompts)
        stopped(one)
    objects = len(list(place.glob("objects/*/*")))
    assert f"{objects} objects" in CliRunner().invoke(cold, ["inspect", "--cold", str(place)]).output
    result = CliRunner().invoke(cold, ["verify", "--cold", str(place), "--all"])
    assert f"sound: {objects};" in result.output
    assert result.exit_code == 0
