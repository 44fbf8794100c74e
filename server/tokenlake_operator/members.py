"""`tokenlake members`, `tokenlake drain` and `tokenlake remove`: an operator reads and changes the members.

A node that drains has a daemon, so that `drain` asks one. The last node of a cluster may be removed, and members may be
listed, while no daemon runs: `members` reads the settings and etcd itself, and `remove` writes to etcd itself where no
daemon of this machine answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tokenlake.config import ServerConfig, format_size
from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake_operator.reaching import Target, operates, settings_file
from tokenlake_server.membership import Account, static_members
from tokenlake_server.tables import print_rows

if TYPE_CHECKING:
    # Imported where it is called: a static list needs no gRPC.
    from tokenlake_client.control import Control
    from tokenlake_proto.v1 import admin_pb2 as pb
    from tokenlake_server.membership.etcd_client import Etcd
    from tokenlake_server.membership.stored import Stored

REACH_S = 5.0
"""Seconds within which etcd must answer a command."""
POLL_S = 0.3
ACCOUNT_S = 5.0
"""Seconds for which `drain` waits for the account of a node that has left."""

T = TypeVar("T")


@click.command()
@click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="The TOML file of a daemon.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def members(file: Path | None, as_json: bool) -> None:
    """List the members of the cluster, their weights and states, from etcd or the list `peers` of the settings. Needs
    no daemon."""
    try:
        config = settings_file(file).config
        text = _described(config)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    if file is None and not config.peers and not config.etcd:
        note = "these are the default settings, with neither 'peers' nor 'etcd': --config names the file of a daemon"
        click.echo(note, err=True)
    if as_json:
        click.echo(json.dumps({"cluster": config.cluster, **text}))
        return
    rows = [
        (name, format_size(each["weight"]), each["state"], each["address"]) for name, each in text["members"].items()
    ]
    title = f"cluster {config.cluster}, epoch {text['epoch']}"
    print_rows(("member", "weight", "state", "address"), rows, title)


@click.command()
@click.argument("name", required=False)
@click.option("--wait/--no-wait", default=True, help="Wait until the node has left. Default: wait.")
@operates
def drain(target: Target, name: str | None, wait: bool, as_json: bool) -> None:
    """Let the node NAME (by default the one that is asked) hand its segments over, leave the cluster and end, and show
    which node took how many, and what is lost."""
    with target.connect() as control:
        own = control.status().node
        node = name or own
        control.drain(node, wait=wait)
        if not as_json:
            click.echo(f"'{node}' drains: it is on the ring no more, and hands its segments over")
        began = time.monotonic()
        left, account = False, None
        while wait and not left:
            time.sleep(POLL_S)
            left, account = _left(control, node, own)
        seconds = time.monotonic() - began
        # The node that is asked may hear of the account after it has heard that the other one left.
        while wait and account is None and node != own and time.monotonic() < began + seconds + ACCOUNT_S:
            time.sleep(POLL_S)
            _, account = _left(control, node, own)
    if as_json:
        told = {} if account is None else _told(account)
        click.echo(json.dumps({"node": node, "left": left, "seconds": round(seconds, 3), **told}))
    elif wait:
        shown = "its log says what moved" if account is None else _account(account)
        click.echo(f"'{node}' left the cluster after {seconds:.0f} s: {shown}")


@click.command()
@click.argument("name")
@operates
def remove(target: Target, name: str, as_json: bool) -> None:
    """Remove the node NAME, which is gone for good, from the ring. Its copies are lost already."""
    try:
        reached = target.connect()
    except Unreachable:
        config = settings_file(target.file, target.node).config if target.remote is None else None
        if config is None or not config.etcd:
            raise
        from tokenlake_server.membership.changes import removed
        from tokenlake_server.membership.stored import change

        _on_etcd(config, lambda etcd: change(etcd, config.cluster, removed(config.cluster, name, dead=True)))
    else:
        with reached as control:
            control.remove(name)
    click.echo(json.dumps({"removed": name}) if as_json else f"'{name}' is not a member of the cluster any more")


def _left(control: Control, node: str, own: str) -> tuple[bool, pb.Drained | None]:
    """Whether the node has left the cluster, and the account of its drain, if it can be read. A daemon that drained has
    ended and answers no call."""
    try:
        cluster = control.cluster()
    except Unreachable:
        if node != own:
            raise
        return True, None
    account = next((each for each in cluster.drained if each.node == node), None)
    return account is not None or node not in {each.node for each in cluster.members}, account


def _account(account: pb.Drained) -> Account:
    moved = tuple((each.node, each.segments, each.bytes) for each in account.moved)
    return Account(moved, (account.lost_segments, account.lost_bytes))


def _told(account: pb.Drained) -> dict[str, Any]:
    """For JSON."""
    return {
        "moved": {each.node: {"segments": each.segments, "bytes": each.bytes} for each in account.moved},
        "lost": {"segments": account.lost_segments, "bytes": account.lost_bytes},
    }


def _on_etcd(config: ServerConfig, work: Callable[[Etcd], Awaitable[T]]) -> T:
    from tokenlake_server.membership.etcd_client import Access, on_any

    return asyncio.run(on_any(Access.of(config), work, REACH_S))


def _stored(config: ServerConfig) -> Stored:
    from tokenlake_server.membership.stored import parse, prefix_of

    return parse(config.cluster, _on_etcd(config, lambda etcd: etcd.read(prefix_of(config.cluster))))


def _described(config: ServerConfig) -> dict[str, Any]:
    if not config.etcd:
        listed = static_members(config)
        return {
            "epoch": listed.record.epoch,
            "members": {
                name: {
                    "weight": each.weight,
                    "state": "listed",
                    "address": str(listed.addresses.get(name, config.listen)),
                }
                for name, each in listed.record.members.items()
            },
        }
    stored = _stored(config)
    if stored.record is None:
        raise Unreachable(f"no daemon of the cluster '{config.cluster}' has joined yet")
    described = {}
    for name, member in stored.record.members.items():
        node = stored.nodes.get(name)
        registration = node.registration if node is not None else None
        state = "draining" if member.draining else "member"
        described[name] = {
            "weight": member.weight,
            "state": state if registration is not None else f"{state}, not registered",
            "address": registration.address if registration is not None else "",
            "version": registration.version if registration is not None else "",
        }
    for name, node in stored.nodes.items():
        if name not in described and node.registration is not None and not node.registration.proven_by:
            described[name] = {
                "weight": node.registration.capacity,
                "state": "asks to join",
                "address": node.registration.address,
                "version": node.registration.version,
            }
    return {"epoch": stored.record.epoch, "members": described}
