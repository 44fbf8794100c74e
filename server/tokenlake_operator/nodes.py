"""The nodes of a cluster as an operator sees them: the daemon that is asked, and others that answer.

Another node is asked at its control socket, where its daemon runs on this machine beside the first one, else at its
setting `control` with the operator's certificate. Of a node that cannot be asked only the facts are known that other
nodes tell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tokenlake.errors import TokenLakeError, Unreachable
from tokenlake_client.control import Control
from tokenlake_operator.reaching import Reached, Target, one_line
from tokenlake_proto.v1 import admin_pb2 as pb

AT_ONCE = 16


@dataclass
class Node:
    """One node that answers."""

    name: str
    control: Control
    status: pb.GetStatusResponse
    cluster: pb.GetClusterResponse
    clock_offset_s: float
    """Seconds by which the clock of the node is ahead of the clock of this machine."""
    uncertainty_s: float
    """Maximum error of `clock_offset_s` in seconds: half of the time in which the node answered."""
    settings: dict[str, pb.Setting] = field(default_factory=dict)
    """The settings of the node by name. Empty for a caller without the role admin."""
    engines: list[pb.Engines] = field(default_factory=list)
    """The connected engines by layout. Empty for a caller without the role admin."""
    paths: dict[str, list[pb.Path]] = field(default_factory=dict)
    """By node: the measured paths from it to this node."""


@contextlib.contextmanager
def reach_all(target: Target, *, alone: bool = False) -> Iterator[tuple[list[Node], dict[str, str]]]:
    """The nodes that answer, the one of `target` first, and by name the reason why others cannot be asked. `alone`: ask
    no other node. Raises `TokenLakeError` where `target` does not answer."""
    with contextlib.ExitStack() as stack:
        first = target.connect()
        stack.enter_context(first)
        node = _look(first.control)
        connected = {peer.node for peer in node.status.peers if peer.state in ("connected", "other ring")}
        others = [each for each in node.cluster.members if each.node != node.name and not alone]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = list(threads.map(lambda member: _other(target, first, node.name, member, connected), others))
        nodes, silent = [node], {}
        for member, (reached, other) in zip(others, found, strict=True):
            if reached is not None:
                stack.enter_context(reached)
            if isinstance(other, Node):
                nodes.append(other)
            else:
                silent[member.node] = other
        yield nodes, silent


def _other(
    target: Target, first: Reached, own: str, member: pb.Member, connected: Container[str]
) -> tuple[Reached | None, Node | str]:
    """The connection with another member and its state, or why there is none. `connected`: the peers of `own` that are
    connected; only their settings `control` are known."""
    attempts: list[Callable[[], Reached]] = []
    if first.socket is not None:
        beside = first.socket.with_name(_renamed(first.socket.name, own, member.node))
        if beside.exists():
            attempts.append(lambda: Target(path=str(beside), daemon_uid=target.daemon_uid).connect())
    if member.control and target.certificates is not None:
        attempts.append(lambda: target.over_tls(member.control, member.node))
    if not attempts:
        if member.node not in connected:
            return None, f"it is not connected with '{own}'"
        if member.control:
            return None, "no certificate was given (--certificate, --key, --ca)"
        return None, "it serves no control plane to other machines (its setting 'control')"
    reason = ""
    for attempt in attempts:
        try:
            reached = attempt()
        except TokenLakeError as error:
            reason = one_line(error)
            continue
        try:
            node = _look(reached.control)
            if node.name != member.node:
                raise Unreachable(f"{reached.place} is the daemon of '{node.name}'")
        except TokenLakeError as error:
            reason = one_line(error)
            reached.control.close()
            continue
        return reached, node
    return None, reason


def _renamed(name: str, own: str, other: str) -> str:
    """The file name of another node's socket, by that of this node's."""
    head, found, tail = name.rpartition(own)
    return f"{head}{other}{tail}" if found else str(Path(name).with_suffix(f".{other}"))


def _look(control: Control) -> Node:
    # The first call makes the connection, which is no part of the time of the clock.
    cluster = control.cluster()
    before = time.time()
    status = control.status()
    after = time.time()
    offset = status.clock_s - (before + after) / 2
    return Node(status.node, control, status, cluster, offset, (after - before) / 2)
