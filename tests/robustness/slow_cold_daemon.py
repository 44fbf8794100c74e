"""`tokenlake serve` whose cold tier takes a second for each deletion."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from tokenlake_server.cli import run_daemon, with_settings
from tokenlake_server.cold.directory import DirectoryObjects


@click.command()
@with_settings
def main(file: Path | None, **flags: object) -> None:
    """Run a daemon whose cold tier deletes slowly."""
    delete = DirectoryObjects.delete

    def slow(self: DirectoryObjects, paths: Sequence[str]) -> None:
        if any(path.startswith("objects/") for path in paths):
            time.sleep(1.0)
        delete(self, paths)

    DirectoryObjects.delete = slow  # type: ignore[method-assign]
    run_daemon(file, flags)


if __name__ == "__main__":
    main()
