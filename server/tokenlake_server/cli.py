"""`tokenlake serve`, `tokenlake replay` and `tokenlake config`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from tokenlake.config import Settings, format_size, load_config
from tokenlake.errors import TokenLakeError
from tokenlake.store.eviction import POLICIES
from tokenlake_server.daemon import Daemon, run
from tokenlake_server.recording import replay as replay_log
from tokenlake_server.watchdog import new_event_loop

__all__ = ["config", "replay", "serve"]

_HELP = {
    "node": "Name of this node, the same after every restart.",
    "memory": "Size of the arena, for instance 16GiB.",
    "socket": "Path of the local socket that engines connect to.",
    "listen": "HOST:PORT for other nodes; loopback only for now.",
    "peers": "name=host:port[/SIZE],... of the cluster's nodes.",
    "metrics": "HOST:PORT of the metrics and health pages; '' for none.",
    "region_size": "Memory that changes hands between tenants as one piece.",
    "lease_s": "Seconds without a heartbeat until an engine's session expires.",
    "reservation_s": "Seconds from prepare to commit.",
    "match_deadline_ms": "How long a match waits for other nodes.",
    "suspect_ms": "How long a peer may leave a ping unanswered.",
    "staged_share": "Share of the slots in which fetched copies may displace home copies.",
    "dirty_share": "Share of the slots being written or waiting to be pushed.",
    "replica_share": "Share of the slots for extra copies of hot segments.",
    "session_lease_share": "Share of the slots that a match may lease to one session.",
    "session_reserve_share": "Share of the slots that one session may have reserved.",
    "max_sessions": "Engines connected at a time.",
    "max_frame": "Size of the largest request.",
    "run_length": "Consecutive segments kept on one node; 0 chooses by the number of nodes.",
    "huge_pages": "true or false: back the arena with huge pages.",
    "arena_directory": "Directory for the arena's files; '' for memfd.",
    "allow_uids": "Users that may connect to the socket: uid,...",
    "query_engine": "true or false: compute attention over this node's segments for engines anywhere.",
    "record": "Write an event log to this file.",
    "failpoint": "For tests: EDGE[:N], where this daemon ends itself.",
    "eviction": f"What a full node gives up first: {', '.join(POLICIES)}.",
    "state_directory": "Directory for what the node learned, to go on with after a restart; '' for none.",
    "background_share": "Share of what comes in while engines read that pushes and copies may be.",
    "hot": "on, observe or off: copy segments that are read so often that their node is overloaded.",
    "time_scale": "For replays: seconds of the workload in each second of the clock.",
    "log_level": "debug, info, warning or error; debug has a line per request.",
}
"""Every field of `ServerConfig` but the secrets: other users can read a command line."""


def _with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    for field, text in reversed(_HELP.items()):
        command = click.option(f"--{field.replace('_', '-')}", default=None, help=text)(command)
    option = click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="A TOML file.")
    return option(command)


def _load(file: Path | None, flags: dict[str, object]) -> Settings:
    try:
        text = file.read_text() if file is not None else None
    except OSError as error:
        raise click.ClickException(f"configuration file {file} cannot be read: {error.strerror}") from error
    return load_config(toml_text=text, environ=os.environ, flags=flags, uid=os.geteuid())


@click.command()
@_with_settings
def serve(file: Path | None, **flags: object) -> None:
    """Run the daemon of this node until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        settings = _load(file, flags)
        logging.getLogger().setLevel(settings.config.log_level.upper())
        _serve(settings)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


def _serve(settings: Settings) -> None:
    began = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("preparing memory"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("memory", total=None)

        def ready(daemon: Daemon) -> None:
            progress.stop()
            metrics = f", metrics http://{daemon.metrics.address}/metrics" if daemon.metrics else ""
            click.echo(
                f"node {settings.config.node} serves {format_size(settings.config.memory)} "
                f"at {settings.config.socket}, peers at {daemon.peers.address}{metrics}, "
                f"after {time.monotonic() - began:.1f} s",
                err=True,
            )

        main = run(settings.config, lambda done, total: progress.update(task, completed=done, total=total), ready)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main)


@click.command()
@click.argument("log", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def replay(log: Path) -> None:
    """Feed an event log (serve --record) through the rules; exit 1 when the instructions differ."""
    try:
        result = replay_log(log)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{result.events} events, {result.instructions} instructions")
    if result.difference:
        raise click.ClickException(f"the instructions differ from the recorded ones at {result.difference}")
    if result.cut_off:
        click.echo(f"the last {result.cut_off} bytes are no whole record: the log was cut off there")
    click.echo("the same instructions as recorded")


@click.group()
def config() -> None:
    """Look at the settings."""


@config.command()
@_with_settings
def show(file: Path | None, **flags: object) -> None:
    """Print each setting, its value and where it came from."""
    try:
        settings = _load(file, flags)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    table = Table("setting", "value", "from")
    for field, value, origin in settings.describe():
        table.add_row(field, value, origin)
    Console().print(table)
