"""A daemon that records its events: `tokenlake serve` with the flag `--record FILE` (`tokenlake_testing.event_log`).

A test starts it as the module of a node (`daemons(record=...)`).
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import click

from tokenlake.core import NodeCore
from tokenlake_server.cli import run_daemon, with_settings
from tokenlake_server.loop.driver import Driver
from tokenlake_testing.event_log import Recorder

RECORDING = "tests.recording_daemon"


@click.command()
@with_settings
@click.option("--record", type=click.Path(path_type=Path), required=True)
def main(file: Path | None, record: Path, **flags: object) -> None:
    """Run the daemon, from the command line of the process."""
    recorders: list[Recorder] = []
    start_core, start_driver = NodeCore.start, Driver.start

    def starting_core(core: NodeCore, now: float) -> None:
        recorders.append(Recorder(record, core.config, now))
        start_core(core, now)

    def starting_driver(driver: Driver) -> None:
        driver.wrap(recorders[0].rules, lambda sink: sink)
        start_driver(driver)

    with mock.patch.object(NodeCore, "start", starting_core), mock.patch.object(Driver, "start", starting_driver):
        try:
            run_daemon(file, flags)
        finally:
            for recorder in recorders:
                recorder.close()


if __name__ == "__main__":
    main()
