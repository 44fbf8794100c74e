"""`tokenlake serve` with one more flag, `--record FILE`: the events of the rules go to an event log."""

from __future__ import annotations

from pathlib import Path

import click

from tokenlake_server.cli import run_daemon, with_settings
from tokenlake_server.start.daemon import Daemon
from tokenlake_testing.event_log import Recorder, recording


@click.command()
@with_settings
@click.option("--record", type=click.Path(dir_okay=False, path_type=Path), required=True)
def main(file: Path | None, record: Path, **flags: object) -> None:
    """Run a daemon that records its events."""
    recorders: list[Recorder] = []

    def made(daemon: Daemon) -> None:
        recorders.append(Recorder(record, daemon.driver.core.config, daemon.rules_started))
        daemon.driver.wrap(recording(recorders[0]), lambda sink: sink)

    try:
        run_daemon(file, flags, made=made)
    finally:
        for recorder in recorders:
            recorder.close()


if __name__ == "__main__":
    main()
