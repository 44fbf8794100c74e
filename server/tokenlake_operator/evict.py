"""`tokenlake evict`: segments leave one node, or every node that can be asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import click

from tokenlake.config import parse_size
from tokenlake.errors import TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake_operator.nodes import Node, reach_all
from tokenlake_operator.reaching import Target, one_line, operates
from tokenlake_proto.v1 import admin_pb2
from tokenlake_server.tables import printable

ONLY_TENANT = "default"
"""Name of the tenant of a daemon without the setting `tenants`."""


class _Size(click.ParamType[int]):
    """A number of bytes above 0, with or without a unit."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            nbytes = parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r} is no size; expected {error}", param, ctx)
        if not nbytes:
            self.fail("a segment has at least one byte", param, ctx)
        return nbytes


@click.command()
@click.option("--tenant", default="", help="Name of the tenant; needed where the daemon has several.")
@click.option("--all", "everything", is_flag=True, help="Evict all segments of the tenant.")
@click.option(
    "--segment",
    "keys",
    multiple=True,
    help="Evict the segment with this key (hexadecimal). May be repeated; - reads keys from standard input.",
)
@click.option("--segment-bytes", type=_Size(), help="Evict the segments of this size, such as 1MiB or 1048576.")
@click.option("--everywhere", is_flag=True, help="Evict at every node that can be asked; default: only at one.")
@click.option("--yes", is_flag=True, help="Evict without the question; needed where there is no terminal.")
@operates
def evict(
    target: Target,
    tenant: str,
    everything: bool,
    keys: tuple[str, ...],
    segment_bytes: int | None,
    everywhere: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Evict segments: those of keys, those of one size, or all of a tenant.

    A segment that is evicted ends its prompt: those behind it are found no more. Segments that an engine reads leave
    when it has released them; those that are being written stay.
    """
    if sum(map(bool, (everything, keys, segment_bytes))) != 1:
        raise click.UsageError("expected one of --all, --segment and --segment-bytes")
    wanted = _keys(keys)
    with reach_all(target, alone=not everywhere) as (nodes, silent):
        _check_tenant(nodes, tenant)
        size = segment_bytes or 0
        if not keys and not yes:
            what = f"all segments of {size} bytes" if size else "all segments"
            owner = f"tenant '{tenant}'" if tenant else "the tenant"
            _confirm(f"Evict {what} of {owner} at {', '.join(node.name for node in nodes)}?")
        evicted: dict[str, int] = {}
        unremoved: dict[str, list[str]] = {}
        failed = dict(silent)
        for node in nodes:
            try:
                chosen = wanted if keys else None
                answer = node.control.evict(keys=chosen, segment_bytes=size, everything=everything, tenant=tenant)
                evicted[node.name] = answer.evicted
                if left := _left(answer):
                    unremoved[node.name] = left
            except TokenLakeError as error:
                failed[node.name] = one_line(error)
    if as_json:
        click.echo(json.dumps({"evicted": evicted, "unremoved": unremoved, "failed": failed}))
    else:
        for name, count in evicted.items():
            click.echo(f"{name}: {count} {'segment' if count == 1 else 'segments'} evicted")
        for name, reasons in unremoved.items():
            for reason in reasons:
                click.echo(f"{name}: {reason}", err=True)
    if failed:
        raise click.ClickException("; ".join(f"{name}: {reason}" for name, reason in failed.items()))


def _left(answer: admin_pb2.EvictResponse) -> list[str]:
    """Texts about segments that are still on a device."""
    texts = [f"not removed yet from {each}; that is done before the device is used again" for each in answer.unremoved]
    return texts + [f"the removal could not be recorded in {each}" for each in answer.unrecorded]


def _check_tenant(nodes: Iterable[Node], tenant: str) -> None:
    """Raises `click.ClickException` where no node has the tenant, before the question is asked."""
    if not tenant:
        return
    known = sorted({name for node in nodes for name in _tenants(node)})
    if tenant not in known:
        raise click.ClickException(f"there is no tenant {tenant!r}; expected one of {', '.join(map(printable, known))}")


def _tenants(node: Node) -> Iterable[str]:
    """The names of the tenants of a node. Raises `TokenLakeError`."""
    (setting,) = (each for each in node.control.config() if each.name == "tenants")
    return setting.digests or (ONLY_TENANT,)


def _confirm(question: str) -> None:
    """Ask on the terminal. Raises `click.Abort` for no, and `click.ClickException` where there is no terminal."""
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.ClickException("not confirmed, nothing was evicted: --yes evicts without the question") from None


def _keys(texts: Iterable[str]) -> list[SegmentKey]:
    """The keys in hexadecimal; `-` stands for those on standard input, one a line. Raises `click.UsageError`."""
    found = []
    for text in texts:
        lines = sys.stdin.read().split() if text == "-" else [text]
        for line in lines:
            try:
                key = bytes.fromhex(line)
            except ValueError:
                key = b""
            if len(key) != KEY_BYTES:
                raise click.UsageError(f"{line!r} is no key: expected {2 * KEY_BYTES} hexadecimal digits")
            found.append(SegmentKey(key))
    return found
