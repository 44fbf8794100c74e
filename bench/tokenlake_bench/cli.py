"""`tokenlake bench` and `tokenlake demo`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from tokenlake.errors import TokenLakeError

_FILE = click.Path(dir_okay=False, path_type=Path)
_DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


def _option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """As `click.option`, with the default in the help."""
    return click.option(*names, show_default=attributes.get("default") not in (None, False, 0.0, ""), **attributes)


_seed = _option("--seed", default=0, help="Seed of all that is drawn.")
_python = _option("--python", type=_FILE, help="Interpreter with the engine. [default for vllm: .venv-vllm's]")
_json = _option("--json", "json_file", type=_FILE, help="Write the result to this file.")


def _run(module: str, command: str, arguments: dict[str, Any]) -> Any:
    """Import the module of a command and run it with its arguments: `run_COMMAND(CommandArguments(...))`. Errors of
    TokenLake end the process with a message."""
    code = import_module(f"tokenlake_bench.{module}")
    make = getattr(code, f"{command.title().replace('_', '')}Arguments")
    try:
        return getattr(code, f"run_{command}")(make(**arguments))
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@click.group()
def bench() -> None:
    """Measure the pool on a workload."""


@bench.command("cache-hit")
@_option(
    "--mode",
    type=click.Choice(["live", "simulate"]),
    default="live",
    help="live: daemons on this machine; simulate: the daemons' rules on a simulated clock.",
)
@_option(
    "--trace", type=_FILE, help="Mooncake's format or coding-agent sessions, .jsonl, .gz or .zst (docs/traces.md)."
)
@_option("--nodes", default=3, help="Daemons to start on this machine, or simulated ones.")
@_option("--capacity-tokens", type=int, help="Of the whole pool. [default: 3,000,000; built-in workload: 24,000]")
@_option("--segment-tokens", type=int, help="Tokens of a segment. [default: 512; built-in workload: 64]")
@_option("--limit", type=int, help="Replay only the first N requests.")
@_seed
@_option(
    "--engine-cache-tokens",
    type=int,
    help="simulate: GPU cache of each instance; --capacity-tokens is the memory behind. [default: no such cache]",
)
@_option("--disk-tokens", type=int, help="simulate: tokens that the nodes' disks hold. [default: no disks]")
@_option("--disk-writes-per-day", type=float, help="simulate: budget of the disks. [default: the setting's]")
@_option("--cold-tokens", type=int, help="simulate: tokens that the shared cold tier holds. [default: none]")
@_option("--cold-latency", type=float, help="simulate: milliseconds until the cold tier's first byte. [default: 2]")
@_option("--cold-rate", type=float, help="simulate: GB/s between each node and the cold tier. [default: 5]")
@_option("--cold-per-day", type=float, help="simulate: bytes that a node may write to it. [default: the setting's]")
@_option("--stop-at", type=float, help="simulate: at this second all nodes stop; others start with the cold tier.")
@_option("--route", help="simulate: the node of each request: least-loaded or round-robin. [default: the first]")
@_option("--pools", help="simulate: forms of the pool, or all. [default: pool, and pool-real for real baselines]")
@_option("--baselines", help="simulate: systems to compare with, all or none. [default: cache-aware-perfect]")
@_option("--model", help="simulate: llama-3-8b or others, or a path of a config.json. [default: llama-3-8b]")
@_option("--gpu", help="simulate: h100 or others, or H100x4 for four per instance. [default: a100-80g, as needed]")
@_option("--tensor-parallel", type=int, help="simulate: GPUs of an instance. [default: what the model needs]")
@_option("--chunk-tokens", type=int, help="simulate: tokens of one forward pass of an engine. [default: 2,048]")
@_option("--balance-threshold", type=int, help="simulate: of cache-aware, in requests. [default: 32, as SGLang's]")
@_option("--nvlink", is_flag=True, help="simulate: nodes connected by NVLink. [default: network adapters]")
@_option("--rate", type=float, help="simulate: requests per second. [default: as in the trace]")
@_option("--open-loop", is_flag=True, help="simulate: requests of sessions arrive at their recorded times.")
@_option("--goodput", is_flag=True, help="simulate: search the highest rate with 90 % of the requests in objective.")
@_option("--copies", type=int, help="simulate: copies of the trace side by side, with shared templates. [default: 1]")
@_option("--restart-every", type=float, help="simulate: every so many seconds, the next engine restarts.")
@_option("--swarm", type=int, help="simulate: every 20 s, add so many requests that share a prefix of 16,384 tokens.")
@_option("--flash-at", type=float, help="simulate: from this second on, 30 % of the requests share a new prefix.")
@_option("--acts", help="simulate: acts of a router that knows the prompts to come: outlook, retain, demote or both.")
@_option("--acts-right", type=float, help="simulate: the share of these acts that is right. [default: 1]")
@_json
def cache_hit(**arguments: Any) -> None:
    """Replay a trace against real daemons, compare every byte, and compare with other arrangements of the same memory.

    Without a trace a built-in workload of conversations is replayed. With --mode simulate: any number of nodes with
    simulated engines, beside other systems. Ctrl-C prints and writes the results so far.
    """
    if not _run("cache_hit", "cache_hit", arguments):
        sys.exit(130)


@bench.command("paper")
@_option("--workload", default="loogle", help="loogle, scbench or sharegpt.")
@_option("--fleet", default="paper", help="paper: 7B on 8 A100 with NVLink; today: 70B on 16 H100 with 400 Gb/s each.")
@_option("--systems", default="all", help="Systems by name; the first one's time to the first token is the others'.")
@_option("--requests", default=1000, help="Requests of a simulation.")
@_option("--capacity-tokens", type=int, help="Of all instances. [default: what fits beside the weights]")
@_option("--rate", type=float, help="Simulate only at this rate, without a search.")
@_seed
@_json
def paper(**arguments: Any) -> None:
    """Simulate the systems of the TokenLake paper beside this pool: goodput, throughput, hits and spread of the load.

    Ctrl-C prints and writes the results so far.
    """
    if not _run("paper.command", "paper", arguments):
        sys.exit(130)


@bench.command("eviction")
@_option("--trace", "traces", type=_FILE, multiple=True, help="A trace in either format; repeatable.")
@_option("--capacity-tokens", help="Capacities of the whole pool: 1000000,3000000. [default: three, by format]")
@_option("--policy", "policies", help="Policies: forecast,lru. [default: all]")
@_option("--nodes", default=1, help="Prompts longer than this part of the capacity are reported apart.")
@_option("--limit", type=int, help="Only the first N requests of each trace.")
@_seed
@_json
def eviction(**arguments: Any) -> None:
    """Compare eviction policies with an infinite cache and with a cache that knows the future.

    Uses the daemons' own stores, without bytes. Ctrl-C prints and writes the results so far.
    """
    sys.exit(0 if _run("eviction.command", "eviction", arguments).complete else 130)


@bench.command("engine")
@_option("--engine", type=click.Choice(["vllm", "transformers"]), default="vllm")
@_option(
    "--against",
    default="none,native",
    help="none: no cache; native: vLLM's own; lmcache: LMCache's server (`make install-lmcache`).",
)
@_option("--model", type=_DIRECTORY, help="Directory of a model.")
@_python
@_option("--lengths", default="1024,4096,16384", help="Lengths of the prompts, in tokens.")
@_option("--repeats", default=3, help="Prompts of each length.")
@_option("--memory-mib", default=64, help="Memory for caches, per instance.")
@_json
def engine(**arguments: Any) -> None:
    """Measure the time to the first token of an engine with and without the pool.

    Then compares two instances behind round robin, with the pool and without, that have the same memory in all.
    """
    _run("engine.command", "engine", arguments)


@bench.command("serve")
@_option("--url", "urls", multiple=True, required=True, help="Address of a server, or of a router; repeatable.")
@_option(
    "--workload",
    type=click.Choice(["chats", "documents", "agents"]),
    default="chats",
    help="chats: several turns with pauses; documents: questions on each; agents: contexts that grow.",
)
@_option("--trace", type=_FILE, help="In place of a workload: a trace, as of `bench cache-hit`.")
@_option("--requests", type=int, help="Requests to send. [default: 200; of a trace: all]")
@_option("--rate", type=float, help="Requests per second on average. [default: 1; of a trace: as recorded]")
@_option("--concurrency", type=int, help="In place of a rate: so many requests at a time.")
@_option(
    "--route",
    type=click.Choice(["turn", "session"]),
    default="turn",
    help="The server of a request, where several are.",
)
@_option("--answer-tokens", type=int, help="Tokens of an answer, on average. [default: 128; of a trace: as recorded]")
@_option("--pause", default=10.0, help="Seconds between an answer and the next turn, median, of chats and agents.")
@_option("--context", type=int, help="Longest prompt with its answer, in tokens. [default: as the server says]")
@_option("--objective", help="Limits of a request, such as ttft=2s,tpot=100ms; also e2e.")
@_option("--model", help="Name of the model. [default: the first one that the server lists]")
@_option("--api", type=click.Choice(["auto", "completions", "chat"]), default="auto", help="The API that is used.")
@_option("--prompts", type=click.Choice(["auto", "ids", "text"]), default="auto", help="The form of the prompts.")
@_option("--vocabulary", type=int, help="Token ids are below this. [default: 32,000, or what the server takes]")
@_option("--key-variable", default="OPENAI_API_KEY", help="The variable with the API key.")
@_option("--timeout", default=120.0, help="Seconds without a part of an answer after which it failed.")
@_option("--metrics", multiple=True, help="Metrics page of an engine; repeatable. [default: those of the servers]")
@_option("--daemon", "daemons", multiple=True, help="Metrics page of a daemon, HOST:PORT or a URL; repeatable.")
@_seed
@_option("--save", "--json", "json_file", type=_FILE, help="Write the result to this file.")
@_option("--against", type=_FILE, help="Print an earlier result, which --save wrote, beside this one.")
def serve(**arguments: Any) -> None:
    """Send requests to servers that run, over the OpenAI API: times, throughput, and where the tokens came from.

    Run it with the pool and without, `--save` the one and give it as `--against` to the other. Ctrl-C prints what was
    measured. Exit status 1: no request was answered.
    """
    result = _run("serve.command", "serve", arguments)
    sys.exit((0 if result.answered else 1) if result.complete else 130)


@bench.command("transfer")
@_option("--against", default="", help="Other stores to run in turn with the pool: mooncake,redis.")
@_option("--sizes", default="1MiB,32MiB", help="Sizes of the segments.")
@_option("--rounds", default=30, help="Repetitions of each row, per peer.")
@_option("--peer-python", type=_FILE, help="Interpreter with the peers' packages. [default: this one]")
@_json
def transfer(**arguments: Any) -> None:
    """Measure the time of each call to the pool (keys, matches, copies, stores and fetches) beside the machine's own
    rates.

    Runs real daemons with two sizes of segments and compares every byte. Peers are started on loopback and ended again;
    nothing is installed: docs/results/transfer.md lists the requirements of each.
    """
    _run("transfer.command", "transfer", arguments)


@bench.command("restart")
@_option("--nodes", default=3, help="Daemons to start on this machine.")
@_option("--requests", default=120, help="Requests before and after each restart.")
@_seed
@_json
def restart(**arguments: Any) -> None:
    """Restart daemons with a disk tier under load, and measure what they find again.

    SIGTERM and kill -9 of each node in turn, then of all nodes at once. Every byte read is compared.
    """
    _run("restart", "restart", arguments)


@bench.command("cold")
@_option("--nodes", default=2, help="Daemons of each cluster.")
@_option("--requests", default=200, help="Requests before the end of a cluster, and of the next one.")
@_option("--late-ms", default=50.0, help="Milliseconds by which reads of the tier begin later, in one of the runs.")
@_option("--directory", type=_DIRECTORY, help="Where the tier is. [default: with the temporary files]")
@_seed
@_json
def cold(**arguments: Any) -> None:
    """Stop or kill a cluster with a cold tier, and measure what another one finds that starts with the tier alone.

    Real daemons and a directory. Every byte read is compared.
    """
    _run("cold", "cold", arguments)


@bench.command("churn")
@_option("--nodes", default=8, help="Daemons at the start.")
@_option(
    "--change",
    "changes",
    multiple=True,
    type=click.Choice(["join", "drain", "kill", "return", "etcd-down"]),
    help="What happens to a node, or to etcd; repeatable. [default: all]",
)
@_option("--rounds", default=5, help="Runs of each change; the table has their medians.")
@_option("--rate", default=10.0, help="Requests per second of each engine; one at each node.")
@_option("--change-s", default=6.0, help="Least seconds of a change, such as of etcd's absence.")
@_option("--encrypt/--plain", default=True, help="With certificates.")
@_seed
@_json
def churn(**arguments: Any) -> None:
    """Measure what a change of the cluster costs its engines.

    Real daemons with etcd as membership. A node joins, drains, is killed or returns while engines read and store at all
    nodes; each run has a control run in which nothing happens. Every byte read is compared. Needs etcd.
    """
    _run("churn", "churn", arguments)


@bench.command("soak")
@_option("--minutes", default=2.0, help="Minutes of load; the checks afterwards take one or two more.")
@_seed
@_option("--nodes", default=3, help="Daemons to start on this machine.")
@_option("--rate", default=10.0, help="Actions per second of each engine process.")
@_option("--fault-every", default=4.0, help="Seconds between two faults, on average.")
@_json
def soak(**arguments: Any) -> None:
    """Run a mixed load while engines and daemons are killed and stopped; every byte is compared.

    Ends with a verdict on each claim, such as that no byte was wrong; the exit status is 1 unless all claims hold.
    Ctrl-C ends the load early.
    """
    sys.exit(0 if _run("soak.command", "soak", arguments).passed else 1)


@click.command()
@_option("--model", type=_DIRECTORY, help="Directory of a model.")
@_json
def demo(**arguments: Any) -> None:
    """Run three daemons and two engines on this machine that share one cache; one daemon is killed halfway."""
    _run("demo.command", "demo", arguments)
