"""`tokenlake serve`, and the settings of a daemon: from its command line, environment, file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click

from tokenlake.config import ServerConfig, Settings, format_size, load_config
from tokenlake.config.setting import settings_of
from tokenlake.errors import ConfigurationError, TokenLakeError
from tokenlake.log_lines import log_objects, set_up_log
from tokenlake_server.loop.watchdog import new_event_loop
from tokenlake_server.start.config_file import read_config_file
from tokenlake_server.start.daemon import Daemon
from tokenlake_server.start.running import run

log = logging.getLogger(__name__)

LINK: Final = re.compile(r" \(\[[^]]*\]\([^)]*\)\)")
"""Matches a link to a document in the meaning of a setting. The help of the command leaves such links out."""


def with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add to a command the option `--config`, its argument `file`, and a flag for each setting. Secrets have no flag,
    because other users of the machine can read a command line."""
    for name, setting in reversed(list(settings_of(ServerConfig).items())):
        if not setting.secret:
            meaning = LINK.sub("", setting.meaning)
            text = f"{meaning[0].upper()}{meaning[1:]}. Value: {setting.kind.expected}."
            command = click.option(f"--{name.replace('_', '-')}", default=None, help=text)(command)
    option = click.option(
        "--config", "file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with the settings."
    )
    return option(command)


def load(file: Path | None, flags: Mapping[str, object]) -> Settings:
    """The settings of a daemon from its file, the environment and flags. Raises `ConfigurationError`."""
    text = None if file is None else read_config_file(file)
    return load_config(toml_text=text, environ=os.environ, flags=flags, uid=os.geteuid(), file=str(file))


@click.command()
@with_settings
def serve(file: Path | None, **flags: object) -> None:
    """Run the daemon of this node until SIGTERM."""
    run_daemon(file, flags)


def run_daemon(
    file: Path | None,
    flags: Mapping[str, object],
    *,
    made: Callable[[Daemon], None] = lambda daemon: None,
) -> None:
    """Run a daemon, as the command `serve` does. `made` is called with the daemon before its first event. Raises
    `click.ClickException`."""
    set_up_log("%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings: Settings | None = None
    try:
        settings = load(file, flags)
        logging.getLogger().setLevel(settings.config.log_level.upper())
        if settings.config.log_format == "json":
            threading.excepthook = log_objects(settings.config.node)
        if settings.ignored:
            log.info("variables of a Kubernetes Service, which are not settings: %s", ", ".join(settings.ignored))
        _serve(settings, made)
    except TokenLakeError as error:
        text = str(error)
        if isinstance(error, ConfigurationError) and settings is not None and error.field in settings.origin:
            text += f" (set by {settings.origin[error.field]})"
        if settings is not None and settings.config.log_format == "json":
            log.critical("%s", text)
            raise click.exceptions.Exit(1) from error
        raise click.ClickException(text) from error


def _serve(settings: Settings, made: Callable[[Daemon], None]) -> None:
    began, text = time.monotonic(), settings.config.log_format == "text"
    with contextlib.ExitStack() as until_ready:
        shown = text and sys.stderr.isatty()
        prepared = until_ready.enter_context(_bar()) if shown else lambda done, total: None

        def say(line: str) -> None:
            """A line for the person who starts the daemon; an object where the log has nothing else."""
            if text:
                click.echo(line, err=True)
            else:
                log.info("%s", line)

        def serving(daemon: Daemon) -> None:
            made(daemon)
            metrics = f", metrics http://{daemon.metrics.address}/metrics" if daemon.metrics else ""
            if daemon.control is not None:
                where = [f"socket {daemon.control.socket}"] if daemon.control.socket is not None else []
                where += [f"port {daemon.control.address}"] if daemon.control.address is not None else []
                log.info("the control plane: %s", ", ".join(where))
            say(
                f"node {settings.config.node} serves its own engines: socket {settings.config.socket}, "
                f"port for peers {daemon.peers.address}{metrics}"
            )

        def ready(daemon: Daemon) -> None:
            until_ready.close()
            membership, size = daemon.membership.state, format_size(settings.config.memory)
            after = f"after {time.monotonic() - began:.1f} s"
            if membership.known:
                state = f"is ready {after}: memory {size}"
            else:
                state = f"is no member of its cluster yet ({membership.problem}); memory {size} is prepared {after}"
            say(f"node {settings.config.node} {state}")

        main = run(settings.config, serving, prepared, ready, origin=settings.origin)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(main)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A progress bar for the memory, which is shown by each call with the bytes that are prepared, and all bytes."""
    # Most daemons have no terminal, and start without these modules in 0.1 s less.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("preparing memory"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("memory", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
