"""`tokenlake completion`: completion of commands, options and names of nodes, for bash, zsh and fish.

The script that it prints calls `tokenlake` with the variable `_TOKENLAKE_COMPLETE` at each press of the key; the
dispatcher passes such calls to this command.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

import click
from click.shell_completion import get_completion_class

from tokenlake.command import COMPLETE_VARIABLE, GROUP, SUMMARIES

PROGRAM = "tokenlake"
SHELLS = ("bash", "zsh", "fish")


class _Commands(click.Group):
    """All commands, each loaded when it is completed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(entry_points(group=GROUP).names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        # The name alone must not load the command: it may need an extra.
        if ctx.resilient_parsing and cmd_name not in _words():
            return click.Command(cmd_name, short_help=SUMMARIES.get(cmd_name))
        found = [each for each in entry_points(group=GROUP) if each.name == cmd_name]
        try:
            command = found[0].load() if found else None
        except ModuleNotFoundError:
            return None
        return command if isinstance(command, click.Command) else None


def _words() -> list[str]:
    return os.environ.get("COMP_WORDS", "").split()


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), required=False)
def completion(shell: str | None) -> None:
    """Print the script that completes the commands of TokenLake in a shell: `eval "$(tokenlake completion bash)"`."""
    group = _Commands(PROGRAM)
    if COMPLETE_VARIABLE in os.environ:
        group.main([], PROGRAM, complete_var=COMPLETE_VARIABLE)
    if shell is None:
        raise click.UsageError(f"expected one of {', '.join(SHELLS)}")
    made = get_completion_class(shell)
    assert made is not None
    complete = made(group, {}, PROGRAM, COMPLETE_VARIABLE)
    click.echo(complete.source_template % complete.source_vars())
