"""`tokenlake check`: segments cross between the nodes, and their bytes are compared."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import click

from tokenlake.config import ENGINE_PREFIX
from tokenlake.errors import CredentialRefused, Unreachable
from tokenlake_client import Pool
from tokenlake_operator.crossing import LEFT_TTL_S, Checker, Crossing, layout_of, probe, segment_bytes
from tokenlake_operator.doctor.base import FOUND
from tokenlake_operator.doctor.running import cure_of
from tokenlake_operator.nodes import Node, reach_all
from tokenlake_operator.reaching import ENGINES_SUFFIX, SUFFIX, Target, operates
from tokenlake_operator.words import amount, per_second, span
from tokenlake_server.tables import print_rows

USUAL_BYTES: Final = 1 << 20
"""Bytes of a segment where no engine has connected yet."""
LEFT_BYTES: Final = 256 << 10
"""Bytes of a segment that is left: the same at all nodes, because the key depends on it."""
MAX_PAIRS: Final = 240
"""Limit of the pairs of nodes that are checked; of larger clusters those with the node of the command."""


@click.command()
@click.option("--leave", is_flag=True, help="Store segments here, for --take at other nodes.")
@click.option("--take", is_flag=True, help="Bring the segments that --leave stored at the other nodes, and compare.")
@operates
def check(target: Target, leave: bool, take: bool, as_json: bool) -> None:
    """Send segments between the nodes of the cluster, and compare their bytes.

    Run it on the machine of a node, as the user of its daemon. Segments are stored here and brought from node to node,
    and back. Other nodes are told to by their control planes: at their sockets, where they run on this machine, else
    with a certificate of the role admin. Where neither can be used, run --leave on each machine, then --take on each.
    Nothing stays behind. Exit status 0: bytes cross between all members, 1: not between all, or not all were checked.
    """
    if leave and take:
        raise click.UsageError("--leave and --take are two commands: --leave on all machines first")
    if target.remote is not None:
        raise click.UsageError(
            "segments are stored by the socket of engines: run the command on the machine of a node, without "
            "HOST:PORT in --node"
        )
    with reach_all(target, alone=leave or take) as (nodes, silent):
        if leave:
            _leave(target, nodes[0], as_json)
            return
        crossings = list(_taken(target, nodes[0])) if take else list(_checked(target, nodes, silent))
    if as_json:
        click.echo(json.dumps({"crossings": [each._asdict() for each in crossings]}))
    else:
        _print(nodes[0].name, crossings)
    if any(each.outcome != "equal" for each in crossings):
        raise click.exceptions.Exit(FOUND)


def _leave(target: Target, here: Node, as_json: bool) -> None:
    with _pool(target, here, LEFT_BYTES) as pool:
        nbytes = Checker(here, pool, layout_of(LEFT_BYTES)).leave()
    if as_json:
        click.echo(json.dumps({"node": here.name, "bytes": nbytes, "for_s": LEFT_TTL_S}))
    else:
        minutes = f"{LEFT_TTL_S / 60:.0f} minutes"
        click.echo(f"{here.name} has {amount(nbytes)} for `tokenlake check --take` at the other nodes.")
        click.echo(f"They are the first to be evicted after {minutes}, and replaced by the next --leave.")


def _taken(target: Target, here: Node) -> Iterator[Crossing]:
    with _pool(target, here, LEFT_BYTES) as pool:
        checker = Checker(here, pool, layout_of(LEFT_BYTES))
        for member in here.cluster.members:
            if member.node != here.name:
                yield checker.take(member.node)


def _checked(target: Target, nodes: Sequence[Node], silent: Mapping[str, str]) -> Iterator[Crossing]:
    here = nodes[0]
    # An engine with segments of another size takes memory from those that run; which tenant this user has is known
    # only behind the connection.
    size = segment_bytes(nodes, None, USUAL_BYTES)
    with _pool(target, here, size) as first:
        size = segment_bytes(nodes, str(first.engine.tenant), size)
    pairs = list(itertools.permutations(nodes, 2))
    if len(pairs) > MAX_PAIRS:
        pairs = [pair for pair in pairs if here in pair]
        click.echo(f"{len(nodes)} nodes: only the pairs with {here.name} are checked", err=True)
    with _pool(target, here, size) as pool:
        checker = Checker(here, pool, layout_of(size))
        with click.progressbar(pairs, label="pairs", file=sys.stderr, hidden=not sys.stderr.isatty()) as listed:
            for source, to in listed:
                yield checker.between(source, to)
    for name, reason in silent.items():
        yield from _not_asked(here, name, reason)


def _not_asked(here: Node, name: str, reason: str) -> Iterator[Crossing]:
    """The two pairs of this node and one that cannot be asked."""
    cure = "give --certificate, --key and --ca; or run `tokenlake check --leave` on both machines, then --take"
    state = next((peer for peer in here.status.peers if peer.node == name), None)
    if state is not None and state.state != "connected":
        cure = cure_of(state)
        reason = f"{state.state}: {state.reason}"
    passed = [each for each in probe(here, name) if not each.problem]
    rate = sum(each.bytes for each in passed) / max(1e-9, sum(each.seconds for each in passed))
    probes = f" (probes pass at {per_second(rate)}; their bytes are not compared)" if passed else ""
    yield Crossing(name, here.name, "not checked", problem=f"{name} was not asked: {reason}{probes}", cure=cure)
    yield Crossing(here.name, name, "not checked", problem=f"{name} was not asked: {reason}", cure=cure)


def _pool(target: Target, here: Node, size: int) -> Pool:
    """A connection to the socket of engines of the node. Raises `TokenLakeError`."""
    places = {each.name: each.value for each in here.control.config()}
    path = places.get("socket", "")
    if target.path is not None and not path:
        path = target.path.removesuffix(SUFFIX) + ENGINES_SUFFIX
    try:
        return Pool.connect(path, layout_of(size), target.token, verify=True, daemon_uid=target.daemon_uid)
    except Unreachable as error:
        raise Unreachable(f"{error}; segments are stored by the socket of engines") from error
    except CredentialRefused as error:
        cure = f"set {ENGINE_PREFIX}CREDENTIAL to the token of a tenant, as for an engine"
        raise CredentialRefused(f"{here.name} refuses the check, which comes as an engine: {error}; {cure}") from error


def _print(here: str, crossings: Iterable[Crossing]) -> None:
    listed = list(crossings)
    if not listed:
        click.echo(f"{here} is the only member of its cluster: there is no other node to check")
        return
    rows = [
        (
            each.source,
            each.to,
            each.outcome,
            span(each.seconds) if each.nbytes else "",
            per_second(each.nbytes / each.seconds) if each.nbytes else "",
        )
        for each in listed
    ]
    print_rows(("from", "to", "bytes", "time", "rate"), rows)
    for each in listed:
        if each.problem:
            click.echo(f"{each.source} -> {each.to}: {each.problem}. {each.cure[:1].upper()}{each.cure[1:]}.")
