"""The `tokenlake` command: it finds the command named first and hands over the rest of the line."""

import re
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points, requires
from typing import NoReturn

GROUP = "tokenlake.commands"

# Kept here, because a command's own help needs the extra that may be missing when the list is printed.
SUMMARIES = {
    "serve": "run the daemon of this node",
    "replay": "feed a recorded event log through the rules and compare the instructions",
    "config": "show each setting, its value and where it came from",
    "explain": "what became of one request, in tokens, and why the rest was missed",
    "demo": "three daemons and two engines on this machine, with and without the pool",
    "bench": "measure the pool on a workload",
    "workload": "write a workload as a trace file",
}


def main() -> NoReturn:
    """Entry of the console script. Exit status: the command's own; 2 for a usage error or a missing extra."""
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(_listing(commands))
        sys.exit(0)
    name, arguments = sys.argv[1], sys.argv[2:]
    entry = commands.get(name)
    if entry is None:
        _fail(f"unknown command {name!r}; known: {', '.join(_ordered(commands))}")
    try:
        command: Callable[..., object] = entry.load()
        # A click command, which ends the process itself. Some miss an extra only when they run.
        command(args=arguments, prog_name=f"tokenlake {name}", standalone_mode=True)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing.startswith("tokenlake"):
            raise
        _fail(
            f"`tokenlake {name}` needs the module {missing!r}, which is not installed; install it with\n"
            f"    pip install 'tokenlake[{_extras(entry, missing)}]'"
        )
    sys.exit(0)


def _listing(commands: dict[str, EntryPoint]) -> str:
    lines = ["usage: tokenlake COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<8} {SUMMARIES.get(name, commands[name].value)}" for name in _ordered(commands)]
    lines += ["", "`tokenlake COMMAND --help` lists the options of a command."]
    return "\n".join(lines)


def _ordered(commands: dict[str, EntryPoint]) -> list[str]:
    """Our own commands in the order of `SUMMARIES`, then those of other distributions by name."""
    return [name for name in SUMMARIES if name in commands] + sorted(commands.keys() - SUMMARIES.keys())


def _extras(entry: EntryPoint, missing: str) -> str:
    """The extras to install, comma separated: the one named like the command's package, and where that does not bring
    the missing module, the one that does. Of several the one with most modules of its own: what a
    command misses first is seldom all that it misses."""
    own = entry.module.partition(".")[0].removeprefix("tokenlake_")
    modules = _modules_of_extras()
    owners = [extra for extra, brought in modules.items() if missing.replace("_", "-").lower() in brought]
    if not owners or own in owners:
        return own
    brought_by = Counter(module for brought in modules.values() for module in brought)
    return f"{own},{max(owners, key=lambda extra: sum(brought_by[module] == 1 for module in modules[extra]))}"


def _modules_of_extras() -> dict[str, list[str]]:
    """The distributions that each extra of this one requires."""
    modules: dict[str, list[str]] = {}
    for requirement in requires("tokenlake") or ():
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra == ['"]([\w-]+)['"]""", requirement)
        if name and extra:
            modules.setdefault(extra[1], []).append(name[0].replace("_", "-").lower())
    return modules


def _fail(message: str) -> NoReturn:
    print(f"tokenlake: {message}", file=sys.stderr)
    sys.exit(2)
