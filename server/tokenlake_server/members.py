"""`tokenlake members`, `tokenlake drain` and `tokenlake remove`: an operator reads and changes the members in etcd.

The commands take the settings of a daemon (its `--config`) and talk to etcd themselves, so that they work while no
daemon runs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.table import Table

from tokenlake.config import ServerConfig, format_size
from tokenlake.errors import MembershipRefused, TokenLakeError
from tokenlake_server.cli import load, with_settings
from tokenlake_server.membership import static_members
from tokenlake_server.tables import print_table

if TYPE_CHECKING:
    # grpcio is an extra, which a static list does not need.
    from tokenlake_server.membership.etcd_client import Etcd
    from tokenlake_server.membership.stored import Stored

__all__ = ["drain", "members", "remove"]

REACH_S = 5.0
"""Seconds within which etcd must answer a command."""
POLL_S = 0.3

T = TypeVar("T")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_settings
def members(file: Path | None, as_json: bool, **flags: object) -> None:
    """List the members of the cluster, their weights and states."""
    config = _config(file, flags)
    text = _described(config)
    if as_json:
        click.echo(json.dumps(text))
        return
    table = Table("member", "weight", "state", "address", title=f"cluster {config.cluster}, epoch {text['epoch']}")
    for name, each in text["members"].items():
        table.add_row(name, format_size(each["weight"]), each["state"], each["address"])
    print_table(table)


@click.command()
@click.argument("name", required=False)
@click.option("--wait/--no-wait", default=True, help="Wait until the node has left. Default: wait.")
@with_settings
def drain(name: str | None, wait: bool, file: Path | None, **flags: object) -> None:
    """Let the node NAME (by default that of the settings) hand its segments over, leave the cluster and end."""
    from tokenlake_server.membership.changes import draining

    config = _with_etcd(_config(file, flags), "drain")
    node = name or config.node
    _change(config, draining(config.cluster, node, alive=True))
    click.echo(f"'{node}' drains: it is on the ring no more, and hands its segments over")
    began = time.monotonic()
    while wait and node in _record_members(config):
        time.sleep(POLL_S)
    if wait:
        click.echo(f"'{node}' left the cluster '{config.cluster}' after {time.monotonic() - began:.0f} s")


@click.command()
@click.argument("name")
@with_settings
def remove(name: str, file: Path | None, **flags: object) -> None:
    """Remove the node NAME, which is gone for good, from the ring. Its copies are lost already."""
    from tokenlake_server.membership.changes import removed

    config = _with_etcd(_config(file, flags), "remove")
    _change(config, removed(config.cluster, name, dead=True))
    click.echo(f"'{name}' is not a member of the cluster '{config.cluster}' any more")


def _config(file: Path | None, flags: Mapping[str, object]) -> ServerConfig:
    try:
        return load(file, flags).config
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


def _with_etcd(config: ServerConfig, command: str) -> ServerConfig:
    if not config.etcd:
        raise click.ClickException(
            f"`tokenlake {command}` needs the setting 'etcd': without it the members are the list 'peers' of each "
            "daemon's settings. Edit it on all nodes and restart them one at a time"
        )
    return config


def _change(config: ServerConfig, edit: Callable[[Stored], Any]) -> None:
    from tokenlake_server.membership.stored import change

    _on_etcd(config, lambda etcd: change(etcd, config.cluster, edit))


def _stored(config: ServerConfig) -> Stored:
    from tokenlake_server.membership.stored import parse, prefix_of

    return parse(config.cluster, _on_etcd(config, lambda etcd: etcd.read(prefix_of(config.cluster))))


def _record_members(config: ServerConfig) -> Mapping[str, Any]:
    record = _stored(config).record
    return record.members if record is not None else {}


def _on_etcd(config: ServerConfig, work: Callable[[Etcd], Awaitable[T]]) -> T:
    from tokenlake_server.membership.etcd_client import Access, on_any

    try:
        return asyncio.run(on_any(Access.of(config), work, REACH_S))
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


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
    try:
        stored = _stored(config)
    except MembershipRefused as error:
        raise click.ClickException(str(error)) from error
    if stored.record is None:
        raise click.ClickException(f"no daemon of the cluster '{config.cluster}' has joined yet")
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
    return {"epoch": stored.record.epoch, "members": described}
