"""The members of a cluster: one contract for the static list and etcd, and what etcd may do to it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.robustness.matrix.proxy import Proxy, Trickle
from tests.server.members import CLUSTER, LIMIT_S, access, ask, clear, config_of, node, nodes, put, stored_ring, until
from tokenlake.config import Address, parse_address
from tokenlake.directory.ring_record import RingRecord
from tokenlake.errors import MembershipRefused, Unreachable
from tokenlake_server.ca import init_ca, issue
from tokenlake_server.loop.admin_thread import AdminThread
from tokenlake_server.membership import Account, Members, keeper, open_membership
from tokenlake_server.membership.changes import draining, removed
from tokenlake_server.membership.etcd_client import Access, Etcd, Read
from tokenlake_server.membership.keeper import LEASE_S, RETRY_S, Keeper, Publish
from tokenlake_server.membership.stored import Registration, change, encode_ring, node_key, parse, prefix_of, ring_key
from tokenlake_testing.etcd import EtcdServers, TlsFiles, etcd_version
from tokenlake_testing.ports import reserve_port

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(etcd_version() is None, reason="etcd is not installed: make install-tools"),
]
ACCOUNT = Account((("c", 3, 3 << 20),), (1, 1 << 20))


@pytest.fixture(scope="module")
def servers() -> Iterator[EtcdServers]:
    with EtcdServers() as running:
        yield running


@pytest.fixture
async def etcd(servers: EtcdServers) -> EtcdServers:
    """One member of etcd, without keys."""
    await clear(servers)
    return servers


@pytest.fixture
def three() -> Iterator[EtcdServers]:
    with EtcdServers(3) as running:
        yield running


# -- one contract


@pytest.fixture(params=["peers", "etcd"])
async def given(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of a membership of each kind."""
    if request.param == "peers":
        return {"peers": "b=127.0.0.1:9"}
    servers: EtcdServers = request.getfixturevalue("servers")
    await clear(servers)
    return {"etcd": servers.endpoints}


async def test_each_membership_keeps_the_contract(given: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    thread = AdminThread()
    membership = open_membership(config_of("a", **given), 1, loop, thread)
    # A daemon starts with these: this node is always among them, and never among the addresses.
    assert "a" in membership.members.record.members
    reported: list[Members] = []

    def changed(members: Members) -> None:
        assert asyncio.get_running_loop() is loop
        assert members == membership.members
        reported.append(members)

    membership.start(Address("127.0.0.1", 8), changed)
    await until(lambda: membership.state.known)
    assert "a" in membership.members.record.members
    assert "a" not in membership.members.addresses
    assert membership.members.addresses.keys() <= membership.members.record.members.keys()
    assert membership.state.epoch == membership.members.record.epoch
    assert membership.state.source
    assert not membership.state.problem
    before = list(reported)
    for _ in range(1000):
        membership.refresh()
    try:
        await membership.drain()
    except MembershipRefused as error:
        assert "'etcd'" in str(error), "the error names the setting with which it works"
        with pytest.raises(MembershipRefused):
            await membership.leave(ACCOUNT)
    else:
        await until(lambda: membership.members.record.members["a"].draining)
        await membership.leave(ACCOUNT)
        await until(lambda: not membership.state.known)
        assert set(membership.members.record.members) == {"a"}, "it serves its engines alone"
    await membership.close()
    await membership.close()
    membership.refresh()
    assert reported[: len(before)] == before


# -- the life of a member in etcd


async def test_nodes_join_find_each_other_and_leave(etcd: EtcdServers) -> None:
    async with nodes("abc", etcd.endpoints) as made:
        a, b, c = made
        for each, own in zip(made, "abc", strict=True):
            others = {name: other.address for name, other in zip("abc", made, strict=True) if name != own}
            assert each.membership.members.addresses == others
        assert len({encode_ring(each.record) for each in made}) == 1
        before = a.record.epoch
        await b.membership.drain()
        await until(lambda: all(each.record.members["b"].draining for each in made))
        await b.membership.leave(ACCOUNT)
        await until(lambda: a.names == c.names == ["a", "c"])
        assert a.record.epoch == before + 2
        # All know what became of its segments, itself too.
        await until(lambda: all(each.membership.members.drained == {"b": ACCOUNT} for each in made))
        # Each report has a higher epoch, or the same record with other addresses.
        for each in (a, c):
            for former, later in itertools.pairwise(each.reported):
                assert later.record == former.record or later.record.epoch > former.record.epoch
    # The account outlives its node: a busy member may read it only after that daemon has ended.
    stored = await ask(etcd, lambda client: client.read(prefix_of(CLUSTER)))
    found = parse(CLUSTER, stored).nodes["b"].registration
    assert found is not None
    assert found.drained == ACCOUNT


async def test_twenty_nodes_join_at_once(etcd: EtcdServers) -> None:
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(node(f"n{at}", etcd.endpoints)) for at in range(20)]
        await until(lambda: all(len(each.names) == 20 for each in made))
        assert (await stored_ring(etcd)).epoch == 20


async def test_a_node_that_starts_again_elsewhere_keeps_its_place(etcd: EtcdServers) -> None:
    async with node("a", etcd.endpoints) as a:
        async with node("b", etcd.endpoints) as b:
            await until(lambda: a.names == b.names == ["a", "b"])
            epoch = a.record.epoch
        port = reserve_port()
        async with node("b", etcd.endpoints, port):
            moved = {"b": Address("127.0.0.1", port)}
            await until(lambda: a.membership.members.addresses == moved)
            assert a.record.epoch == epoch


async def test_a_killed_daemon_is_replaced_at_once(etcd: EtcdServers) -> None:
    """A killed daemon is replaced at once, and a living one is not."""
    listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    async with node("a", etcd.endpoints, port) as first:
        await until(lambda: first.membership.state.known)
        async with node("a", etcd.endpoints) as second:
            await until(lambda: "another daemon is called 'a'" in second.membership.state.problem)
            assert f"127.0.0.1:{port}" in second.membership.state.problem
            assert not second.membership.state.known
            assert second.names == ["a"]
            assert first.membership.state.known
            # The daemon of the first ends without a word; its registration is live for seconds.
            listening.close()
            await until(lambda: second.membership.state.known)


@pytest.mark.parametrize("same", [True, False])
async def test_two_machines_with_one_name(etcd: EtcdServers, same: bool) -> None:
    """Such as two copies of one machine, which both name their own loopback: the one that started first gives way."""
    port = reserve_port()

    async def registered() -> tuple[Address | None, int]:
        [found] = await ask(etcd, lambda e: e.read(node_key(CLUSTER, "a")))
        return parse_address(json.loads(found.value)["address"]), found.mod_revision

    async with node("a", etcd.endpoints, port) as first:
        await until(lambda: first.membership.state.known)
        async with node("a", etcd.endpoints, port if same else None) as second:
            await until(lambda: "another daemon is called 'a'" in first.membership.state.problem)
            await until(lambda: second.membership.state.known and not second.membership.state.problem)
            before = await registered()
            await asyncio.sleep(2 * RETRY_S)
            assert await registered() == before
        await until(lambda: not first.membership.state.problem)
        assert (await registered())[0] == Address("127.0.0.1", port)


async def test_a_removed_node_stays_out_until_it_starts_again(etcd: EtcdServers) -> None:
    async with node("a", etcd.endpoints) as a:
        async with node("b", etcd.endpoints) as b:
            await until(lambda: b.names == ["a", "b"])
            with pytest.raises(MembershipRefused, match="drain b"):
                await ask(etcd, lambda e: change(e, CLUSTER, removed(CLUSTER, "b", dead=True)))
            await ask(etcd, lambda e: change(e, CLUSTER, removed(CLUSTER, "b")))
            await until(lambda: b.names == ["b"] and a.names == ["a"])
            assert "was removed" in b.membership.state.problem
            assert not b.membership.state.known
        with pytest.raises(MembershipRefused, match="not a member"):
            await ask(etcd, lambda e: change(e, CLUSTER, removed(CLUSTER, "b", dead=True)))
        async with node("b", etcd.endpoints) as b:
            await until(lambda: a.names == b.names == ["a", "b"])
        await ask(etcd, lambda e: change(e, CLUSTER, removed(CLUSTER, "b", dead=True)))
        await until(lambda: a.names == ["a"])


async def test_only_a_proven_node_joins(etcd: EtcdServers) -> None:
    """Also where the record has its name already, and its friends stay out with it."""
    async with node("a", etcd.endpoints) as a:
        async with node("b", etcd.endpoints) as b:
            await until(lambda: a.names == b.names == ["a", "b"])
        ring = a.record
        async with node("b", etcd.endpoints) as b, node("c", etcd.endpoints) as c:
            b.trusts = c.trusts = False
            for each in (b, c):
                await until(lambda each=each: a.membership.members.unproven.keys() == {"b", "c"})  # type: ignore[misc]
                await until(lambda each=each: each.membership.members.unproven == {"a": a.address})  # type: ignore[misc]
                assert "no member of the ring has proven it" in each.membership.state.problem
                assert not each.membership.state.known
            assert (b.names, c.names) == (["b"], ["c"])
            # A proof of another process of that name does not count.
            a.membership.proven("c", c.incarnation - 1)
            assert a.record == await stored_ring(etcd) == ring
            # The name of an unproven node may be given away while its daemon runs.
            await ask(etcd, lambda e: change(e, CLUSTER, removed(CLUSTER, "b", dead=True)))
            await until(lambda: a.names == ["a"])
            b.trusts = c.trusts = True
            await until(lambda: a.names == b.names == c.names == ["a", "b", "c"])
            assert a.record.epoch == ring.epoch + 3


async def test_two_founders_at_once_make_one_ring(etcd: EtcdServers) -> None:
    for empty in (False, True):
        if empty:
            await put(etcd, ring_key(CLUSTER), encode_ring(RingRecord(9, 524288.0, {})))
        async with nodes("ab", etcd.endpoints) as (a, b):
            assert a.record == b.record == await stored_ring(etcd)
        await clear(etcd)


async def test_the_next_member_proves_where_the_first_does_not(etcd: EtcdServers) -> None:
    """Members take turns; one that is cut off from a newcomer keeps it out for a moment only."""
    async with nodes("ab", etcd.endpoints) as (a, b):
        for cut_off in (a, b):
            cut_off.trusts = False
            async with node("c", etcd.endpoints) as c:
                await until(lambda: c.membership.state.known)
                await c.membership.leave(ACCOUNT)
                await until(lambda: a.names == b.names == ["a", "b"])
            cut_off.trusts = True


async def test_a_start_ends_a_drain_and_takes_the_new_size(etcd: EtcdServers) -> None:
    async with node("a", etcd.endpoints) as a:
        async with node("b", etcd.endpoints) as b:
            await until(lambda: a.names == b.names == ["a", "b"])
            await ask(etcd, lambda e: change(e, CLUSTER, draining(CLUSTER, "b")))
            await until(lambda: b.record.members["b"].draining)
        async with node("b", etcd.endpoints, memory="128MiB") as b:
            await until(lambda: a.record.members["b"].weight == 128 << 20)
            assert not a.record.members["b"].draining


async def test_unproven_registrations_change_nothing(etcd: EtcdServers) -> None:
    """Neither the address of a member whose name they have, nor, with an impossible size, the record; and such a
    member is not let drain."""
    async with node("a", etcd.endpoints) as a:
        async with node("b", etcd.endpoints) as b:
            await until(lambda: a.names == ["a", "b"] and bool(a.membership.members.addresses))
            known = a.membership.members.addresses
            assert known == {"b": b.address}
        ring = await stored_ring(etcd)
        sizes = {"b": 1 << 20, "c": 0, "d": 1 << 60}
        for name, capacity in sizes.items():
            posing = Registration("127.0.0.1:9", 7, capacity, "1")
            await put(etcd, node_key(CLUSTER, name), msgspec.json.encode(posing))
            if name != "b":
                a.membership.proven(name, 7)
        await until(lambda: a.membership.members.unproven == {"b": Address("127.0.0.1", 9)})
        assert a.membership.members.addresses == known
        assert await stored_ring(etcd) == ring
        with pytest.raises(MembershipRefused, match="no member has proven"):
            await a.membership.drain("b")
        for name in "cd":
            a.membership.proven(name, 7)
        a.membership.proven("b", 7)
        await until(lambda: a.membership.members.addresses == {"b": Address("127.0.0.1", 9)})
        assert a.names == ["a", "b"]
        assert not a.membership.state.problem


# -- failures of etcd


@pytest.mark.parametrize("fault", ["down", "frozen"])
async def test_a_ring_outlives_etcd(fault: str) -> None:
    """A ring outlives etcd, and a node joins at its return."""
    with EtcdServers() as servers:
        async with nodes("ab", servers.endpoints) as (a, _):
            former = a.membership.members
            servers.kill() if fault == "down" else servers.freeze()
            async with node("c", servers.endpoints) as c:
                await until(lambda: bool(a.membership.state.problem))
                await asyncio.sleep(3 * LEASE_S)
                assert a.membership.members == former
                assert a.membership.state.known
                assert not c.membership.state.known
                assert c.names == ["c"]
                assert "etcd at 127.0.0.1" in c.membership.state.problem
                servers.restart() if fault == "down" else servers.thaw()
                await until(lambda: c.names == ["a", "b", "c"])
                await until(lambda: a.names == ["a", "b", "c"] and len(a.membership.members.addresses) == 2)
                assert not a.membership.state.problem


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_the_leader_of_three_goes_and_a_node_joins(fault: str, three: EtcdServers) -> None:
    async with node("a", three.endpoints) as a:
        await until(lambda: a.membership.state.known)
        leader = three.wait_leader()
        three.kill(leader) if fault == "killed" else three.freeze(leader)
        async with node("b", three.endpoints) as b:
            # An election takes 1 to 2 s, and a frozen member is noticed after as long.
            await until(lambda: a.names == b.names == ["a", "b"], 15.0)
            assert not b.membership.state.problem
            three.restart() if fault == "killed" else three.thaw(leader)
            await until(lambda: len(a.membership.members.addresses) == 1)
        assert (await stored_ring(three)).epoch == 2


async def test_lost_leases_and_compaction_change_no_ring(etcd: EtcdServers) -> None:
    async with nodes("ab", etcd.endpoints) as (a, b):
        former = a.membership.members
        for each in await ask(etcd, lambda e: e.read(prefix_of(CLUSTER))):
            if each.lease:
                await ask(etcd, lambda e, lease=each.lease: e.revoke(lease))  # type: ignore[misc]
        registered = {node_key(CLUSTER, "a"), node_key(CLUSTER, "b"), ring_key(CLUSTER)}
        async with asyncio.timeout(10.0):
            while {each.key for each in await ask(etcd, lambda e: e.read(prefix_of(CLUSTER)))} != registered:
                await asyncio.sleep(0.02)
        await until(lambda: not a.membership.state.absent and not b.membership.state.absent)
        await compact(etcd)
        async with node("c", etcd.endpoints) as c:
            await until(lambda: a.names == c.names == ["a", "b", "c"])
        assert {
            tuple(sorted(each.record.members)) for each in a.reported if each.record.epoch >= former.record.epoch
        } == {("a", "b"), ("a", "b", "c")}


def post(servers: EtcdServers, path: str, body: Mapping[str, object]) -> Any:
    """The reply of etcd's JSON gateway."""
    request = urllib.request.Request(f"http://127.0.0.1:{servers.ports[0]}/v3/{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=5) as reply:
        return json.load(reply)


async def compact(servers: EtcdServers) -> None:
    """Forget all former revisions."""

    revision = (await asyncio.to_thread(post, servers, "kv/range", {"key": "AA=="}))["header"]["revision"]
    await asyncio.to_thread(post, servers, "kv/compaction", {"revision": revision, "physical": True})


async def test_endpoints_without_a_server_are_passed_over(etcd: EtcdServers) -> None:
    dead = ",".join(f"127.0.0.1:{reserve_port()}" for _ in range(7))
    # Each begins with a random endpoint.
    async with nodes("abc", f"{dead},{etcd.endpoints}") as made:
        assert all(each.membership.state.known for each in made)


async def test_a_silent_watch_is_noticed(etcd: EtcdServers) -> None:
    async with Etcd(access(etcd), Address("127.0.0.1", etcd.ports[0])) as connection:
        watch = connection.watch(prefix_of(CLUSTER))
        await anext(watch)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(changed := asyncio.ensure_future(anext(watch))), 2.5)
        etcd.freeze()
        try:
            with pytest.raises(Unreachable, match="silent on a watch"):
                await asyncio.wait_for(changed, LIMIT_S)
        finally:
            etcd.thaw()


async def test_a_member_whose_registration_expires(etcd: EtcdServers) -> None:
    """A member keeps its address when its registration expires."""
    async with node("a", etcd.endpoints) as a:
        async with node("b", etcd.endpoints) as b:
            await until(lambda: a.names == b.names == ["a", "b"] and bool(a.membership.members.addresses))
        known = a.membership.members
        await until(lambda: a.membership.state.absent == ("b",))
        assert a.membership.members == known


async def test_a_slow_etcd_serves(etcd: EtcdServers) -> None:
    with Proxy(("127.0.0.1", etcd.ports[0])) as slow:
        # An answer takes some 300 ms.
        slow.fault = Trickle("down", 8)
        async with nodes("ab", f"127.0.0.1:{slow.port}") as (a, _):
            former = a.membership.members
            await asyncio.sleep(2 * LEASE_S)
            assert a.membership.members == former
            assert not a.membership.state.problem
            assert not a.membership.state.absent


def authenticate_users(servers: EtcdServers) -> None:
    """Let etcd know the user root with the password r, and no others."""
    for path, body in (
        ("auth/user/add", {"name": "root", "password": "r"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/enable", {}),
    ):
        post(servers, path, body)


async def test_users_of_etcd_are_authenticated(caplog: pytest.LogCaptureFixture) -> None:
    """A token ends when no call was made for 5 minutes (here 1 s), and the watch is none: its end is no problem."""
    user: dict[str, Any] = {"etcd_user": "root", "etcd_password": "r"}
    with EtcdServers(auth_token_ttl="1") as servers:
        await asyncio.to_thread(authenticate_users, servers)
        for wrong, named in (({}, "user name is empty"), (user | {"etcd_password": "other"}, "(user 'root')")):
            async with node("a", servers.endpoints, **wrong) as a:
                await until(lambda a=a, named=named: named in a.membership.state.problem)  # type: ignore[misc]
                assert "other" not in a.membership.state.problem
        caplog.clear()
        async with node("a", servers.endpoints, **user) as a:
            await until(lambda: a.membership.state.known)
            await asyncio.sleep(4.0)
            async with node("b", servers.endpoints, **user) as b:
                await until(lambda: a.names == b.names == ["a", "b"])
                assert not [each for each in caplog.records if each.levelno >= logging.WARNING]


async def test_connections_to_etcd_may_be_encrypted(tmp_path: Path) -> None:
    init_ca(tmp_path, CLUSTER)
    files = TlsFiles(*issue(tmp_path, "etcd", ("127.0.0.1",)), tmp_path / "ca.pem")
    own = issue(tmp_path, "a", ("127.0.0.1",))
    init_ca(tmp_path / "other", CLUSTER)
    given: dict[str, Any] = {"etcd_ca": str(files.ca), "etcd_certificate": str(own[0]), "etcd_key": str(own[1])}

    with EtcdServers(files=files) as servers:
        async with node("a", servers.endpoints, **given) as a:
            await until(lambda: a.membership.state.known)
        wrong = given | {"etcd_ca": str(tmp_path / "other" / "ca.pem")}
        for settings in (wrong, {}, {"etcd_ca": given["etcd_ca"]}):
            async with node("b", servers.endpoints, **settings) as b:
                await until(lambda b=b: servers.endpoints in b.membership.state.problem)  # type: ignore[misc]
                assert not b.membership.state.known
        missing = given | {"etcd_ca": str(tmp_path / "none.pem")}
        async with node("a", servers.endpoints, **given), node("b", servers.endpoints, **missing) as b:
            await until(lambda: "'etcd_ca'" in b.membership.state.problem)
            # The files are read again at each attempt.
            (tmp_path / "none.pem").write_bytes(files.ca.read_bytes())
            await until(lambda: b.membership.state.known)


# -- bad input


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("ring", "no JSON", "/tokenlake/test/ring of etcd is no ring record"),
        ("ring", '{"epoch": -1, "unit": 1, "members": {}}', "no ring record"),
        ("ring", '{"epoch": 1, "unit": 1, "members": {"a/b": {"weight": 1}}}', "no ring record"),
        ("ring", '{"epoch": 1, "unit": 1, "members": {"z": {"weight": 1000000000000}}}', "virtual nodes"),
        ("ring", '{"epoch": 1, "unit": 1, "members": {"z": {"weight": 1' + "0" * 400 + "}}}", "no ring record"),
        ("ring", '{"epoch": 1, "unit": 1, "members": {}, "x": ' + "[" * 10000 + "]" * 10000 + "}", "no ring record"),
        ("ring", '{"epoch": 1000000000000000000, "unit": 1, "members": {}}', "epoch of 1000000000000000000"),
        ("users/7", "{}", "keys of another application below /tokenlake/test/"),
    ],
)
async def test_a_prefix_that_no_daemon_wrote_is_refused(etcd: EtcdServers, key: str, value: str, named: str) -> None:
    path = f"/tokenlake/test/{key}".encode()
    await put(etcd, path, value.encode())
    async with node("a", etcd.endpoints) as a:
        await until(lambda: named in a.membership.state.problem)
        assert not a.membership.state.known
        assert a.names == ["a"]
        await ask(etcd, lambda e: e.write({}, [], [path]))
        await until(lambda: a.membership.state.known)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("b", '{"address": "127.0.0.1:1", "incarnation": 1, "capacity": 1, "version": "1", "x": ' + "[" * 10000),
        ("a", '{"address": "x..y:1", "incarnation": 1, "capacity": 1, "version": "1"}'),
    ],
)
async def test_a_registration_that_no_daemon_wrote_keeps_no_node_out(etcd: EtcdServers, name: str, value: str) -> None:
    async with node("c", etcd.endpoints) as c:
        await until(lambda: c.membership.state.known)
        await put(etcd, node_key(CLUSTER, name), value.encode())
        async with node("a", etcd.endpoints) as a:
            await until(lambda: a.membership.state.known, 10 * RETRY_S)


async def test_a_node_keeps_its_ring_when_the_record_is_forged(etcd: EtcdServers) -> None:
    async with nodes("ab", etcd.endpoints) as (a, _):
        former = a.record
        for forged, named in (
            (RingRecord(1, former.unit, {}), "is lower than the epoch"),
            (RingRecord(former.epoch, former.unit, {}), "kept its epoch"),
        ):
            await put(etcd, ring_key(CLUSTER), encode_ring(forged))
            await until(lambda named=named: named in a.membership.state.problem)  # type: ignore[misc]
            assert a.record == former
            assert a.membership.state.known
        await ask(etcd, lambda e: e.write({}, [], [ring_key(CLUSTER)]))
        await until(lambda: not a.membership.state.problem)
        assert await stored_ring(etcd) == former


async def test_fields_of_a_later_version_are_kept(etcd: EtcdServers) -> None:
    members = '{"a": {"weight": 1048576}, "z": {"weight": 67108864, "rack": 3}}'
    text = f'{{"epoch": 4, "unit": 524288, "members": {members}, "later": [1]}}'
    await put(etcd, ring_key(CLUSTER), text.encode())
    await put(etcd, prefix_of(CLUSTER) + b"later/key", b"1")
    await put(etcd, node_key(CLUSTER, "z"), b"not a registration")
    async with node("a", etcd.endpoints) as a:
        await until(lambda: a.names == ["a", "z"])
    found = await ask(etcd, lambda e: e.read(ring_key(CLUSTER)))
    written = json.loads(found[0].value)
    assert written["later"] == [1]
    assert written["members"]["z"] == {"weight": 67108864, "draining": False, "rack": 3}
    assert written["epoch"] == 5


async def test_a_problem_is_logged_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    with EtcdServers() as servers:
        async with node("a", servers.endpoints) as a:
            await until(lambda: a.membership.state.known)
            servers.kill()
            with caplog.at_level(logging.INFO):
                await until(lambda: bool(a.membership.state.problem))
                await asyncio.sleep(3)
                servers.restart()
                await until(lambda: not a.membership.state.problem)
        lines = [record.getMessage() for record in caplog.records if "etcd" in record.getMessage()]
        assert len([line for line in lines if line.startswith("membership: etcd at 127.0.0.1")]) == 1
        assert len([line for line in lines if "answers again" in line]) == 1


# -- the keeper alone


def keeper_of(publish: Publish = lambda members, state: None) -> Keeper:
    registration = Registration("127.0.0.1:7000", 1, 1 << 20, "1")
    return Keeper(Access((Address("127.0.0.1", 1),)), CLUSTER, "a", registration, publish)


async def test_a_session_ends_when_its_watch_fails_beside_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch reports a change and fails in one iteration of the loop. A session that went on would neither watch nor
    renew the lease."""
    sessions: list[object] = []

    class Failing:
        def __init__(self, access: Access, endpoint: Address) -> None:
            sessions.append(self)

        async def __aenter__(self) -> Failing:
            return self

        async def __aexit__(self, *error: object) -> None:
            return None

        async def read(self, prefix: bytes) -> list[Read]:
            raise MembershipRefused("the step waits for the next change")

        async def watch(self, prefix: bytes) -> AsyncIterator[None]:
            await asyncio.sleep(0.01)
            yield None
            raise Unreachable("the endpoint died")

    monkeypatch.setattr(keeper, "Etcd", Failing)

    running = asyncio.ensure_future(keeper_of().run())
    try:
        await until(lambda: len(sessions) > 1, 2 * RETRY_S)
    finally:
        running.cancel()
        await asyncio.wait([running], timeout=1)
