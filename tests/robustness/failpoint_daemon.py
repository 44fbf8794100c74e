"""`tokenlake serve` with one more flag, `--failpoint EDGE[:N]`: the daemon kills itself when it reaches the edge for
the N-th time."""

from __future__ import annotations

from pathlib import Path

import click

from tests.robustness.failpoints import arm, parse
from tokenlake.errors import ConfigurationError
from tokenlake_server.cli import run_daemon, with_settings


@click.command()
@with_settings
@click.option("--failpoint", required=True)
def main(file: Path | None, failpoint: str, **flags: object) -> None:
    """Run a daemon that ends at the edge."""
    try:
        point = parse(failpoint)
    except ConfigurationError as error:
        raise click.ClickException(str(error)) from error
    run_daemon(file, flags, made=lambda daemon: arm(daemon.driver, point))


if __name__ == "__main__":
    main()
