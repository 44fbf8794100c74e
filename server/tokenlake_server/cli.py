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
from tokenlake_server.daemon import Daemon, run
from tokenlake_server.recording import replay as replay_log

__all__ = ["config", "replay", "serve"]

_SETTINGS = [
    ("node", "Name of this node, the same after every restart."),
    ("memory", "Size of the arena, for instance 16GiB."),
    ("socket", "Path of the local socket that engines connect to."),
    ("listen", "HOST:PORT for other nodes; loopback only for now."),
    ("peers", "name=host:port[/SIZE],... of the cluster's nodes."),
    ("metrics", "HOST:PORT of the metrics and health pages; '' for none."),
    ("record", "Write an event log to this file."),
    ("region-size", "Memory that changes hands between tenants as one piece."),
    ("lease-s", "Seconds without a heartbeat until an engine's session expires."),
    ("reservation-s", "Seconds from prepare to commit."),
    ("match-deadline-ms", "How long a match waits for other nodes."),
    ("suspect-ms", "How long a peer may leave a ping unanswered."),
]


def _with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, text in reversed(_SETTINGS):
        command = click.option(f"--{name}", default=None, help=text)(command)
    option = click.option("--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="A TOML file.")
    return option(command)


def _load(file: Path | None, flags: dict[str, object]) -> Settings:
    try:
        text = file.read_text() if file is not None else None
    except OSError as error:
        raise click.ClickException(f"configuration file {file} cannot be read: {error.strerror}") from error
    return load_config(toml_text=text, environ=os.environ, flags=flags)


@click.command()
@_with_settings
def serve(file: Path | None, **flags: object) -> None:
    """Run the daemon of this node until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        settings = _load(file, flags)
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
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


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
