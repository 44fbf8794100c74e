"""`tokenlake evict`: segments leave one node, or every node that can be asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import click

from tokenlake.errors import TokenLakeError
from tokenlake.identity import SegmentKey
from tokenlake.keys import KEY_BYTES
from tokenlake_operator.nodes import Node, reach_all
from tokenlake_operator.reaching import Target, one_line, operates

__all__ = ["evict"]


@click.command()
@click.option("--tenant", default="", help="Name of the tenant; needed where the daemon has several.")
@click.option("--all", "everything", is_flag=True, help="All segments of the tenant.")
@click.option("--segment", "keys", multiple=True, help="Key of a segment in hexadecimal; repeatable; - reads them.")
@click.option("--layout", help="Beginning of the fingerprint of a layout of engines that are connected.")
@click.option("--segment-bytes", type=click.IntRange(1), help="Segments of this size.")
@click.option("--everywhere", is_flag=True, help="At every node that can be asked, and not only at one.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@operates
def evict(
    target: Target,
    tenant: str,
    everything: bool,
    keys: tuple[str, ...],
    layout: str | None,
    segment_bytes: int | None,
    everywhere: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Evict segments: those of keys, those of one layout (or of its size), or all of a tenant.

    A segment that is evicted ends its prompt: those behind it are found no more. Segments that an engine reads leave
    when it has released them; those that are being written stay.
    """
    if sum(map(bool, (everything, keys, layout, segment_bytes))) != 1:
        raise click.UsageError("expected one of --all, --segment, --layout and --segment-bytes")
    wanted = _keys(keys)
    with reach_all(target, alone=not everywhere) as (nodes, silent):
        size = _size(nodes, layout) if layout else segment_bytes or 0
        if not keys and not yes:
            what = f"all segments of {size} bytes" if size else "all segments"
            owner = f"tenant '{tenant}'" if tenant else "the tenant"
            _confirm(f"Evict {what} of {owner} at {', '.join(node.name for node in nodes)}?")
        evicted: dict[str, int] = {}
        failed = dict(silent)
        for node in nodes:
            try:
                chosen = wanted if keys else None
                evicted[node.name] = node.control.evict(
                    keys=chosen, segment_bytes=size, everything=everything, tenant=tenant
                )
            except TokenLakeError as error:
                failed[node.name] = one_line(error)
    if as_json:
        click.echo(json.dumps({"evicted": evicted, "failed": failed}))
    else:
        for name, count in evicted.items():
            click.echo(f"{name}: {count} segments evicted")
    if failed:
        raise click.ClickException("; ".join(f"{name}: {reason}" for name, reason in failed.items()))


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


def _size(nodes: Iterable[Node], fingerprint: str) -> int:
    """The bytes of a segment of the layout whose fingerprint begins so. Raises `click.ClickException`."""
    layouts = {
        each.layout.fingerprint.hex(): each.layout.segment_bytes for node in nodes for each in node.control.engines()
    }
    sizes = {size for name, size in layouts.items() if name.startswith(fingerprint.lower())}
    if len(sizes) != 1:
        known = ", ".join(sorted(layouts)) or "none"
        raise click.ClickException(
            f"{len(sizes)} layouts of connected engines begin with {fingerprint!r}; their fingerprints: {known}"
        )
    return sizes.pop()
