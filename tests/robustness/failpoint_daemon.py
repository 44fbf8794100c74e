"""`tokenlake serve` with one more flag, `--failpoint EDGE:N`: the daemon kills itself when it reaches the edge for
the N-th time."""

from __future__ import annotations

from pathlib import Path

import click

from tests.robustness.failpoints import BY_NAME, arm
from tokenlake_server.cli import run_daemon, with_settings


@click.command()
@with_settings
@click.option("--failpoint", required=True)
def main(file: Path | None, failpoint: str, **flags: object) -> None:
    """Run a daemon that ends at the edge."""
    edge, _, time = failpoint.partition(":")
    run_daemon(file, flags, made=lambda daemon: arm(daemon.driver, BY_NAME[edge], int(time)))


if __name__ == "__main__":
    main()
