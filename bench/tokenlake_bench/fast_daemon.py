"""`tokenlake serve` with one more flag, `--speed N`: the clock of the daemon's rules runs N times as fast.

In a replay at N times a trace's speed, the rules then see the loads, half-lives and ages of segments of the trace.
Deadlines are measured by the same clock, so their settings must be N times as long (`LiveOptions.settings`).
"""

from __future__ import annotations

from pathlib import Path

import click

from tokenlake_server.cli import run_daemon, with_settings

MAX_SPEED = 1000.0


@click.command()
@with_settings
@click.option("--speed", type=click.FloatRange(0.001, MAX_SPEED), required=True)
def main(file: Path | None, speed: float, **flags: object) -> None:
    """Run a daemon whose rules have a clock N times as fast as real time, from the command line of the process."""
    run_daemon(file, flags, speed=speed)


if __name__ == "__main__":
    main()
