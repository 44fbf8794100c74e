"""The `tokenlake` command: it finds the command that its first argument names and passes the other arguments to it.

Distributions offer commands as entry points of the group `tokenlake.commands`.
"""

import difflib
import re
import signal
import sys
from collections.abc import Callable, Collection
from importlib.metadata import EntryPoint, entry_points, requires, version
from typing import NoReturn

GROUP = "tokenlake.commands"

# The one-line help of the commands is listed here, because loading a command to get its help may need extras that are
# not installed.
GROUPS = {
    "run": {
        "serve": "run the daemon of this node",
        "config": "show each setting and its source, and the sizes of known models",
        "ca": "make a certificate authority, and certificates of nodes",
    },
    "watch": {
        "status": "show nodes, their memory and hits, and problems with their cures",
        "top": "watch rates per node and tenant, hot prefixes and slow calls",
        "page": "print the address of the page of a node, with a token that expires",
        "explain": "show what the pool had of a request, and why the rest was missed",
        "doctor": "check a node before and while it runs, and name the cures",
        "check": "send segments between all nodes and compare their bytes",
        "members": "list the members of the cluster, their weights and states",
        "events": "print stores and evictions of segments, and changes of the ring",
    },
    "change": {
        "drain": "let a node hand its segments over, leave the cluster and end",
        "remove": "remove a node that is gone for good from the ring",
        "evict": "evict segments by key, size or tenant",
        "warm": "bring prompts to the memory of nodes before requests come",
        "pin": "bring prompts to the memory of nodes and keep them there for a time",
        "unpin": "end pins",
        "cold": "show, verify and expire what is in the cold tier",
    },
    "try": {
        "demo": "run daemons and engines on this machine, with and without the pool",
        "bench": "measure the pool on a workload",
        "workload": "write a workload, or your own logs, as a trace file",
    },
}
SUMMARIES = {name: text for commands in GROUPS.values() for name, text in commands.items()}
BENCH = "tokenlake-bench"
"""Name of the Python distribution with the benchmarks, which a node does not need."""
IN_A_CLONE = "(in a clone of the repository: pip install . ./bench)"
BENCH_COMMANDS = tuple(GROUPS["try"])
DISTRIBUTIONS = {"grpc": "grpcio", "google": "protobuf"}
"""By module, the distribution that has it, where the names differ."""
EXTRAS_OF_PACKAGES = {"tokenlake_server": ("server",), "tokenlake_operator": ("server",)}
"""By package, the extras of `tokenlake` that its commands need."""


def main() -> NoReturn:
    """Run the `tokenlake` command and exit with the status of the command that it found; 2 for a usage error or a
    missing extra."""
    commands = {entry.name: entry for entry in entry_points(group=GROUP)}
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(_listing(commands))
        sys.exit(0)
    if sys.argv[1] == "--version":
        print(f"tokenlake {version('tokenlake')}")
        sys.exit(0)
    name, arguments = sys.argv[1], sys.argv[2:]
    entry = commands.get(name)
    if entry is None and name in BENCH_COMMANDS:
        _fail(f"`tokenlake {name}` comes with another package; install it with\n    pip install {BENCH}\n{IN_A_CLONE}")
    if entry is None:
        near = difflib.get_close_matches(name, _ordered(commands), n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        _fail(f"unknown command {name!r}; {meant}known: {', '.join(_ordered(commands))}")
    if name == "serve":
        end_at_sigterm()
    try:
        command: Callable[..., object] = entry.load()
        # Commands are click commands, which end the process. Some import modules of an extra only when they run.
        command(args=arguments, prog_name=f"tokenlake {name}", standalone_mode=True)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing.startswith("tokenlake"):
            raise
        requirement = requirement_of(entry, missing)
        in_a_clone = requirement.replace("tokenlake[", ".[") if "[" in requirement else ". ./bench"
        _fail(
            f"`tokenlake {name}` needs the module {missing!r}, which is not installed; install it with\n"
            f"    pip install {requirement}\n(in a clone of the repository: pip install {in_a_clone})"
        )
    sys.exit(0)


def end_at_sigterm() -> None:
    """Let SIGTERM end this process with status 0 while a daemon is imported, which takes a third of a second: as
    process 1 of a container it would not get a signal that it does not handle."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))


def _listing(commands: dict[str, EntryPoint]) -> str:
    lines = ["usage: tokenlake COMMAND [OPTIONS]"]
    others = {name: entry.value for name, entry in sorted(commands.items()) if name not in SUMMARIES}
    for group, summaries in {**GROUPS, "others": others}.items():
        listed = [f"  {name:<10} {summary}" for name, summary in summaries.items() if name in commands]
        lines += ["", f"{group}:", *listed] if listed else []
    lines += ["", "`tokenlake COMMAND --help` lists its options; `tokenlake --version`"]
    if not set(BENCH_COMMANDS) <= commands.keys():
        lines.append(f"More commands ({', '.join(BENCH_COMMANDS)}): pip install {BENCH}")
        lines.append(IN_A_CLONE)
    return "\n".join(lines)


def _ordered(commands: Collection[str]) -> list[str]:
    """Returns the names of the commands: those of this distribution in the order of `SUMMARIES`, then those of other
    distributions by name."""
    return [name for name in SUMMARIES if name in commands] + sorted(set(commands) - SUMMARIES.keys())


def requirement_of(entry: EntryPoint, missing: str) -> str:
    """The argument of `pip install`, quoted for a shell, that brings the module `missing` to the command `entry`. For a
    command of the distribution `tokenlake` that is the extras of the command's package and, if these lack the
    module, also the smallest extra that has it (an extra that includes another lists its modules too). For any other
    command it is the command's distribution, whose installation is incomplete."""
    distribution = DISTRIBUTIONS.get(missing, missing).replace("_", "-").lower()
    modules = _modules_of_extras()
    owners = [extra for extra, brought in modules.items() if distribution in brought]
    needed = list(EXTRAS_OF_PACKAGES.get(entry.module.partition(".")[0], ()))
    if owners and not set(owners) & set(needed):
        needed.append(min(owners, key=lambda extra: len(modules[extra])))
    if needed:
        return f"'tokenlake[{','.join(needed)}]'"
    return entry.dist.name if entry.dist else entry.module.partition(".")[0].replace("_", "-")


def _modules_of_extras() -> dict[str, list[str]]:
    """Returns the names of the distributions that each extra of `tokenlake` requires."""
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
