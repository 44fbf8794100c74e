"""`tokenlake serve` whose process stays behind the end of the daemon: one of its threads hangs."""

from __future__ import annotations

import signal
from pathlib import Path

import click

from tokenlake_server.cli import run_daemon, with_settings
from tokenlake_server.start.daemon import Daemon


@click.command()
@with_settings
def main(file: Path | None, **flags: object) -> None:
    """Run a daemon whose process does not end."""
    close = Daemon.close

    async def stays(self: Daemon) -> None:
        await close(self)
        click.echo("it has left, and stays", err=True)
        signal.pause()

    Daemon.close = stays  # type: ignore[method-assign]
    run_daemon(file, flags)


if __name__ == "__main__":
    main()
