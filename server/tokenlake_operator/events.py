"""`tokenlake events` prints the segments that are stored at a node or leave it, and the changes of the ring."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import click

from tokenlake_operator.plain import plain
from tokenlake_operator.reaching import Target, operates
from tokenlake_operator.words import amount
from tokenlake_proto.v1 import events_pb2 as pb
from tokenlake_server.tables import printable


@click.command()
@click.option("--snapshot", is_flag=True, help="Print the segments that the node has now, and end.")
@click.option("--after", help="Print the changes behind this cursor. Each line of --json has the cursor of its change.")
@click.option("--count", type=click.IntRange(1), help="End after this number of changes.")
@operates
def events(target: Target, snapshot: bool, after: str | None, count: int | None, as_json: bool) -> None:
    """Print each change at one node as it happens: segments that were stored or are gone, and changes of the ring.

    With --json each line is one object: `what` is `stored`, `gone`, `ring`, or `there` for a segment of --snapshot.
    """
    if snapshot and after:
        raise click.UsageError("--snapshot and --after exclude each other")
    cursor = _cursor(after) if after else None
    printed = 0
    with target.connect() as control, contextlib.closing(control.events(cursor)) as stream:
        for message in stream:
            if message.HasField("snapshot"):
                if snapshot:
                    _print(_there(message), as_json)
                    if message.snapshot.complete:
                        return
                continue
            for each in _changes(message):
                _print([each], as_json)
                printed += 1
                if printed == count:
                    return


def _cursor(text: str) -> pb.Cursor:
    incarnation, _, sequence = text.partition(".")
    if not incarnation.isdigit() or not sequence.isdigit():
        raise click.UsageError(f"{text!r} is no cursor: expected two numbers with a dot between them")
    return pb.Cursor(incarnation=int(incarnation), sequence=int(sequence))


def _there(message: pb.SubscribeResponse) -> Iterator[dict[str, Any]]:
    cursor = f"{message.cursor.incarnation}.{message.cursor.sequence}"
    for segment in message.snapshot.segments:
        yield {"what": "there", "node": message.node, "cursor": cursor, **plain(segment)}


def _changes(message: pb.SubscribeResponse) -> Iterator[dict[str, Any]]:
    for change in message.changes:
        what = str(change.WhichOneof("what"))
        cursor = f"{message.cursor.incarnation}.{change.sequence}"
        yield {"what": what, "node": message.node, "cursor": cursor, **plain(getattr(change, what))}


def _print(changes: Iterator[dict[str, Any]] | list[dict[str, Any]], as_json: bool) -> None:
    for each in changes:
        if as_json:
            click.echo(json.dumps(each))
        elif each["what"] == "ring":
            members = ", ".join(f"{name} {amount(weight)}" for name, weight in each["members"].items())
            click.echo(f"ring    epoch {each['epoch']}: {printable(members)}")
        else:
            size = amount(each["segment_bytes"])
            click.echo(f"{each['what']:<7} {each['key']}  {printable(each['tenant'])}  segment {each['depth']}, {size}")
