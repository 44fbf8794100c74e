"""`tokenlake serve` of a version that adds a field to every message, and that sends with each ping a message of a type
that the version before does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from tests.rules.next_version import installed


class Novel(msgspec.Struct, frozen=True, array_like=True, tag=120):
    """The message of the new type."""

    text: str = "of the next version"


def main() -> None:
    """Run the daemon with the messages of the newer version."""
    with installed():
        from tokenlake.core.instructions import SendToPeer
        from tokenlake.wire import peer
        from tokenlake_server.cli import run_daemon, with_settings
        from tokenlake_server.loop.driver import Sink
        from tokenlake_server.start.daemon import Daemon

        def sink(carry_out: Sink) -> Sink:
            def sending(instruction: Any) -> None:
                carry_out(instruction)
                if isinstance(instruction, SendToPeer) and isinstance(instruction.message, peer.Ping):
                    assert "added" in instruction.message.__struct_fields__
                    carry_out(SendToPeer(instruction.node, Novel()))  # type: ignore[arg-type]

            return sending

        def made(daemon: Daemon) -> None:
            daemon.driver.wrap(lambda handle: handle, sink)

        @click.command()
        @with_settings
        def serve(file: Path | None, **flags: object) -> None:
            run_daemon(file, flags, made=made)

        serve()


if __name__ == "__main__":
    main()
