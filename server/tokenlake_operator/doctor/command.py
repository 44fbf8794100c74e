"""`tokenlake doctor`: checks a node before and while it runs."""

from __future__ import annotations

import datetime
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from tokenlake.config import ServerConfig, Settings, load_config
from tokenlake.config.setting import PlainRefusal, settings_of
from tokenlake.errors import ConfigurationError, CredentialRefused, ProtocolRefused, TokenLakeError, Unreachable
from tokenlake_operator.doctor.base import FOUND, Finding, print_findings
from tokenlake_operator.doctor.certificates import check_certificates
from tokenlake_operator.doctor.cluster import compare
from tokenlake_operator.doctor.cold import check_cold
from tokenlake_operator.doctor.machine import Machine, check_machine
from tokenlake_operator.doctor.membership import check_membership
from tokenlake_operator.doctor.places import check_directories, check_ports, check_sockets
from tokenlake_operator.doctor.running import check_changed, check_node
from tokenlake_operator.doctor.settings import check_settings
from tokenlake_operator.nodes import Node, reach_all
from tokenlake_operator.reaching import Target, one_line, operates
from tokenlake_operator.words import per_second, span
from tokenlake_server.engines.connected_process import credentials
from tokenlake_server.engines.local_socket import listens
from tokenlake_server.start.config_file import read_config_file, read_foreign_file
from tokenlake_server.tables import print_rows

MEASURE_S = 10.0
"""Seconds that all measurements take together, at 1 s each at most."""
DIAL_S = 1.0
"""Limit of the seconds in which a connection to a socket of this machine is made: a stopped daemon accepts none."""


@click.command()
@click.option("--measure/--no-measure", default=True, help="Send up to 256 MiB per node, for at most 1 s. Default: do.")
@operates
def doctor(target: Target, measure: bool, as_json: bool) -> None:
    """Check a node: its settings, files and machine, and once it runs also the cluster around it.

    Without a daemon the settings of --config and of the environment are checked as a start would use them. With one,
    its connections are checked, and those nodes that can be asked from here are compared: clocks, settings, secrets,
    layouts of engines, round trip and bandwidth in both directions. `tokenlake check` sends segments between all nodes.
    Exit status 0: nothing was found, 1: see the findings.
    """
    report = examine(target, measure=measure)
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report)
    if report["findings"]:
        raise click.exceptions.Exit(FOUND)


def examine(target: Target, machine: Machine | None = None, *, measure: bool = True) -> dict[str, Any]:
    """The report of all checks, as `--json` prints it. `machine`: of the node, where it is not this process's. Raises
    `TokenLakeError` for a daemon of another machine that does not answer."""
    nodes: list[Node] = []
    silent: dict[str, str] = {}
    not_checked: list[str] = []
    findings: list[Finding] = []
    given = _Given(target) if target.remote is None else None
    asked = given.asked if given is not None else target
    if asked is None:
        lack = "its control socket is turned off" if given is not None and given.node else "its settings cannot be read"
        not_checked.append(f"the work of the daemon: {lack}")
    else:
        try:
            with reach_all(asked) as (nodes, silent):
                _ask(nodes, not_checked, measure=measure)
        except Unreachable as error:
            if given is None:
                raise
            if given.runs:
                cure = "look at its log; `kill -CONT` its process if it is stopped, else restart it"
                findings.append(Finding("error", "daemon-silent", given.place, one_line(error), cure))
            else:
                not_checked.append(f"the work of the daemon: {one_line(error)}")
    if given is not None:
        if target.file is None:
            checked = "the settings of the daemon" if nodes else "the environment and the defaults"
            not_checked.append(f"the file of the settings: give --config; {checked} were checked")
        findings += given.check(nodes, machine)
    for node in nodes:
        findings += check_node(node)
    if nodes:
        findings += compare(nodes)
    not_checked += [f"{name}: {reason}" for name, reason in silent.items()]
    return {
        "node": nodes[0].name if nodes else given.node if given is not None else "",
        "running": bool(nodes) or (given is not None and given.runs),
        "findings": [each.plain() for each in dict.fromkeys(findings)],
        "not_checked": not_checked,
        "paths": list(_paths(nodes)),
    }


class _Given:
    """The settings of the daemon of this machine, as its start would use them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._findings: list[Finding] = []
        self._settings = _read(target, self._findings)

    @property
    def node(self) -> str:
        """The name of the node; empty where the settings cannot be read."""
        return self._settings.config.node if self._settings is not None else ""

    @property
    def place(self) -> str:
        """The daemon, for people."""
        return self._target.path or (self._settings.config.control_socket if self._settings is not None else "")

    @property
    def asked(self) -> Target | None:
        """The target, with the control socket that the file gives; None where there is none."""
        target = self._target
        if target.path is not None or (target.file is None and self._settings is not None):
            return target
        path = self._settings.config.control_socket if self._settings is not None else ""
        return Target(path=path, certificates=target.certificates, daemon_uid=target.daemon_uid) if path else None

    @property
    def runs(self) -> bool:
        """True if a process accepts connections at one of the daemon's sockets, as far as this user can see."""
        config = self._settings.config if self._settings is not None else None
        paths = [self._target.path] if self._target.path else [config.control_socket, config.socket] if config else []
        return any(listens(path) for path in paths if path)

    def check(self, nodes: Sequence[Node], machine: Machine | None) -> Iterator[Finding]:
        """Check the settings, and this machine for them. `nodes`: those that answer, this one first."""
        settings = self._settings
        if nodes and self._target.file is None:
            # The environment of this shell is not that of the daemon.
            settings = _of_daemon(nodes[0])
        else:
            yield from self._findings
        if settings is None:
            return
        if nodes and self._target.file is not None:
            shown = {name: value for name, value, _ in settings.describe()}
            public = {name: value for name, value in shown.items() if not settings_of(ServerConfig)[name].secret}
            yield from check_changed(nodes[0], public, str(self._target.file))
        running = bool(nodes) or self.runs
        config = settings.config
        yield from check_settings(config)
        yield from check_machine(config, machine or Machine(_pid(self.place) if running else None), running=running)
        yield from check_certificates(config, datetime.datetime.now(datetime.UTC))
        yield from check_directories(config)
        yield from check_cold(config)
        if not running:
            yield from check_ports(config)
            yield from check_sockets(config)
        yield from check_membership(config, running=running)


def _read(target: Target, findings: list[Finding]) -> Settings | None:
    """The settings; None where they cannot be read. Each error in them is added to the findings."""
    text, file = None, target.file
    if file is not None:
        try:
            text = read_config_file(file)
        except ConfigurationError as error:
            problem, cure = _problem_and_cure(error)
            findings.append(Finding("error", "settings-file", str(file), f"the daemon does not start: {problem}", cure))
            try:
                text = read_foreign_file(file)
            except ConfigurationError:
                return None
    environ: dict[str, str] = dict(os.environ)
    while True:
        try:
            flags = {"node": target.node}
            return load_config(toml_text=text, environ=environ, flags=flags, uid=os.geteuid(), file=str(file))
        except ConfigurationError as error:
            findings.append(Finding("error", "settings", error.field, *_problem_and_cure(error)))
            # A variable with a wrong name or value: the settings without it are checked too.
            variable = f"TOKENLAKE_{error.field.upper()}"
            if variable not in environ:
                return None
            del environ[variable]


def _problem_and_cure(error: ConfigurationError) -> tuple[str, str]:
    if isinstance(error, PlainRefusal):
        return error.problem, error.cure
    return _before(error), f"set {error.expected}"


def _before(error: ConfigurationError) -> str:
    """The problem in an error whose `expected` is the cure."""
    return f"{error.field} is {error.value!r}"


def _pid(path: str) -> int | None:
    """The number of the process that listens at the path; None where it accepts no connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(DIAL_S)
        try:
            sock.connect(path)
            return credentials(sock).pid or None
        except OSError:
            return None


def _of_daemon(node: Node) -> Settings | None:
    """The settings that a daemon runs with, but its secrets; None for a caller without the role admin."""
    flags = {name: each.value for name, each in node.settings.items() if not settings_of(ServerConfig)[name].secret}
    if not flags:
        return None
    try:
        return load_config(toml_text=None, environ={}, flags=flags, uid=os.geteuid())
    except ConfigurationError:
        return None  # of another version


def _ask(nodes: Sequence[Node], not_checked: list[str], *, measure: bool) -> None:
    """Ask each node for the facts that only an admin may read. The first one measures the paths from its peers, and
    each other one that from the first."""
    first = nodes[0]
    peers = [peer.node for peer in first.status.peers if peer.state in ("connected", "other ring")]
    max_s = min(1.0, MEASURE_S / max(1, len(peers) + len(nodes) - 1))
    for node in nodes:
        try:
            node.settings = {each.name: each for each in node.control.config()}
            node.engines = node.control.engines()
            sources = peers if node is first else [first.name] if node.name in peers else []
            for source in sources if measure else []:
                node.paths[source] = node.control.measure(source, max_s=max_s)
        except CredentialRefused as error:
            not_checked.append(f"settings, engines and paths of {node.name}: {error}")
        except ProtocolRefused as error:
            not_checked.append(
                f"{node.name} is of version {node.status.version}, and cannot be asked all: {one_line(error)}"
            )
        except TokenLakeError as error:
            not_checked.append(f"{node.name} did not answer all: {one_line(error)}")


def _paths(nodes: Iterable[Node]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        for source, paths in node.paths.items():
            for path in paths:
                yield {
                    "from": source,
                    "to": node.name,
                    "address": path.address,
                    "round_trip_s": path.round_trip_s,
                    "bytes_per_s": path.bytes / path.seconds if path.seconds else 0.0,
                    "problem": path.problem,
                }


def _print(report: Mapping[str, Any]) -> None:
    if report["node"]:
        click.echo(f"node {report['node']}: its daemon {'runs' if report['running'] else 'does not run'}")
    else:
        click.echo("the settings cannot be read, so that the node and its daemon are not known")
    rows = [
        (each["from"], each["to"], each["address"], span(each["round_trip_s"]), per_second(each["bytes_per_s"]))
        for each in report["paths"]
    ]
    if rows:
        print_rows(("from", "to", "address", "round trip", "bandwidth"), rows)
    if report["findings"] or report["running"]:
        print_findings(Finding(*(each[name] for name in Finding._fields)) for each in report["findings"])
    else:
        click.echo("The settings and this machine have no problem; the daemon does not run.")
    for each in report["not_checked"]:
        click.echo(f"not checked: {each}")
