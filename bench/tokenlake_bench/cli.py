"""`tokenlake bench` and `tokenlake demo`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tokenlake.errors import TokenLakeError

_FILE = click.Path(dir_okay=False, path_type=Path)
_trace = click.option("--trace", type=_FILE, help="A trace in Mooncake's format, .jsonl or .jsonl.zst.")
_any_trace = click.option(
    "--trace", type=_FILE, help="A trace in Mooncake's format or coding-agent sessions, .jsonl or .zst."
)
_json = click.option("--json", "json_file", type=_FILE, help="Write the result to this file.")


@click.group()
def bench() -> None:
    """Measure the pool on a workload."""


@bench.command("cache-hit")
@click.option(
    "--mode",
    type=click.Choice(["live", "simulate"]),
    default="live",
    show_default=True,
    help="live: daemons on this machine; simulate: the daemons' rules on a simulated clock.",
)
@_any_trace
@click.option("--nodes", default=3, show_default=True, help="Daemons to start on this machine, or simulated ones.")
@click.option(
    "--capacity-tokens", type=int, help="Capacity of the whole pool. [default: 3,000,000; built-in workload: 24,000]"
)
@click.option(
    "--engine-cache-tokens",
    type=int,
    help="simulate: GPU cache of each instance; --capacity-tokens is the memory behind. [default: no such cache]",
)
@click.option("--disk-tokens", type=int, help="Tokens that the nodes' disks hold. [default: no disks]")
@click.option(
    "--disk-writes-per-day",
    type=float,
    help="Budget of the disks, as in the setting. [default: the setting's; with --speed 0 no limit]",
)
@click.option(
    "--disk-directory",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="live: the daemons' disks are files below this directory. [default: the system's for temporary files]",
)
@click.option("--segment-tokens", type=int, help="Tokens of a segment. [default: 512; built-in workload: 64]")
@click.option("--limit", type=int, help="Replay only the first N requests.")
@click.option("--speed", default=0.0, show_default=True, help="Trace seconds per second; 0: as fast as possible.")
@click.option(
    "--route",
    help="The node of each request: round-robin, random or conversation; simulate: least-loaded or round-robin. "
    "[default: the first of these]",
)
@click.option("--seed", default=0, show_default=True, help="Seed of token ids, bytes, routes and placements.")
@click.option("--flash-at", type=float, help="From this second on, 30 % of the requests share a new prefix.")
@click.option(
    "--shipped-deadlines",
    is_flag=True,
    help="Use the daemons' default deadlines, in place of longer ones with which a busy machine changes no result.",
)
@click.option("--pools", help="simulate: forms of the pool, or all. [default: pool, and pool-real for real baselines]")
@click.option("--baselines", help="simulate: systems to compare with, all or none. [default: cache-aware-perfect]")
@click.option("--model", help="simulate: the model of an instance. [default: llama-3-8b]")
@click.option("--gpu", help="simulate: the GPU; an instance has as many as the model needs. [default: a100-80g]")
@click.option("--rate", type=float, help="simulate: requests per second. [default: as in the trace]")
@click.option("--open-loop", is_flag=True, help="Requests of sessions arrive at their recorded times, answered or not.")
@click.option(
    "--copies", type=int, help="simulate: copies of the trace side by side, with shared templates. [default: 1]"
)
@click.option(
    "--swarm", type=int, help="simulate: every 20 s, add so many requests that share a new prefix of 16,384 tokens."
)
@_json
@click.option("--plot", "plot_file", type=_FILE, help="Draw the result as this .png file.")
def cache_hit(**arguments: object) -> None:
    """Replay a trace against real daemons, compare every byte, and compare with other arrangements of the same memory.

    Without a trace a built-in workload of conversations is replayed. With --mode simulate: any number of nodes with
    simulated engines, beside other systems. Ctrl-C prints and writes the results so far.
    """
    from tokenlake_bench.cache_hit import CacheHitArguments, run_cache_hit
    from tokenlake_bench.simulation.command import SimulateArguments, run_simulate

    complete = True
    try:
        if arguments.pop("mode") == "simulate":
            complete = run_simulate(SimulateArguments(**arguments))  # type: ignore[arg-type]
        else:
            run_cache_hit(CacheHitArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    if not complete:
        sys.exit(130)


@bench.command("eviction")
@click.option(
    "--trace", "traces", type=_FILE, multiple=True, help="A trace in Mooncake's format or of sessions; repeatable."
)
@click.option("--capacity-tokens", help="Capacities of the whole pool: 1000000,3000000. [default: three, by format]")
@click.option("--policy", "policies", help="Policies: lru,s3fifo. [default: all]")
@click.option("--nodes", default="1", show_default=True, help="Numbers of nodes that share the capacity: 1,8.")
@click.option(
    "--hint-accuracy", type=float, help="Clients hint whether a conversation goes on; share of right hints, 0 to 1."
)
@click.option("--limit", type=int, help="Only the first N requests of each trace.")
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the sessions' start times, the right hints and the placement."
)
@_json
@click.option("--plot", "plot_file", type=_FILE, help="Draw the result as this .png file.")
def eviction(**arguments: object) -> None:
    """Compare eviction policies with an infinite cache and with a cache that knows the future.

    Uses the daemons' own stores, without bytes. Ctrl-C prints and writes the results so far.
    """
    from tokenlake_bench.eviction.command import EvictionArguments, run_eviction

    try:
        result = run_eviction(EvictionArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if result.complete else 130)


@bench.command("engine")
@click.option("--engine", type=click.Choice(["vllm", "transformers"]), default="vllm", show_default=True)
@click.option(
    "--against",
    default="none,native",
    show_default=True,
    help="none: no cache; native: vLLM's own; lmcache: LMCache's server (`make install-lmcache`).",
)
@click.option(
    "--families",
    default="",
    help="all, or some of llama, fp8-cache, quantised, mla, sliding-window, hybrid, speculative, lora.",
)
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Directory of a model.")
@click.option("--python", type=_FILE, help="Interpreter with the engine. [default for vllm: .venv-vllm's]")
@click.option("--lengths", default="1024,4096,16384", show_default=True, help="Lengths of the prompts, in tokens.")
@click.option("--repeats", default=3, show_default=True, help="Prompts of each length.")
@click.option("--memory-mib", default=64, show_default=True, help="Memory for caches, per instance.")
@_json
def engine(**arguments: object) -> None:
    """Measure the time to the first token of an engine with and without the pool.

    Then compares two instances behind round robin, with the pool and without, that have the same memory in all. With
    --families, also measures a small model of each family, of which a second process reads what the first one stored.
    """
    from tokenlake_bench.engine_bench import EngineArguments, run_engine

    try:
        run_engine(EngineArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("handover")
@click.option("--handovers", default=100, show_default=True, help="Prompts that are handed over at once.")
@click.option("--tokens", default=700, show_default=True, help="Length of the first of these prompts, in tokens.")
@click.option("--long-tokens", default=4000, show_default=True, help="Length of the prompts that are timed.")
@click.option("--repeats", default=5, show_default=True, help="Prompts that are timed, and requests that move.")
@click.option("--nodes", default=2, show_default=True, help="1: both engines on one node; 2: each on its own.")
@click.option("--python", type=_FILE, help="Interpreter with vLLM. [default: .venv-vllm's]")
@_json
def handover(**arguments: object) -> None:
    """Let one engine compute prompts and another one generate their tokens.

    Counts the hand-overs after which the second engine computed one token, times its first token against a bare copy
    of the same bytes, and counts what an engine computes of requests that were aborted at another one.
    """
    from tokenlake_bench.handover import HandoverArguments, run_handover

    try:
        run_handover(HandoverArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("transfer")
@click.option("--against", default="", help="Other stores to run in turn with the pool: mooncake,redis,lmcache.")
@click.option("--sizes", default="1MiB,32MiB", show_default=True, help="Sizes of the segments.")
@click.option(
    "--encrypt",
    type=click.Choice(["on", "off"]),
    default="off",
    show_default=True,
    help="on: also two nodes with certificates, in turn with the plain ones.",
)
@click.option(
    "--nixl",
    type=click.Choice(["on", "off"]),
    default="off",
    show_default=True,
    help="on: also two nodes that read with NIXL, and NIXL alone, in turn with the plain ones.",
)
@click.option("--rounds", default=30, show_default=True, help="Repetitions of each row, per peer.")
@click.option("--peer-python", type=_FILE, help="Interpreter with the peers' packages. [default: this one]")
@_json
@click.option("--plot", "plot_file", type=_FILE, help="Draw the result as this .png file.")
def transfer(**arguments: object) -> None:
    """Measure the time of each call to the pool (keys, matches, copies, stores and fetches) beside the machine's own
    rates.

    Runs real daemons with two sizes of segments and compares every byte. Peers are started on loopback and ended again;
    nothing is installed: docs/results/transfer.md lists the requirements of each.
    """
    from tokenlake_bench.transfer.command import TransferArguments, run_transfer

    try:
        run_transfer(TransferArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("disk")
@click.option(
    "--path",
    default=".",
    show_default=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Directory on the device; the files are made in a new directory there, and removed.",
)
@click.option("--sizes", default="1MiB", show_default=True, help="Sizes of the segments.")
@click.option("--total", default="2GiB", show_default=True, help="Bytes of all segments, and of fio's file.")
@click.option("--seconds", default=4.0, show_default=True, help="Length of one measurement.")
@click.option("--rounds", default=3, show_default=True, help="Repetitions of each row, in turn with fio.")
@_json
def disk(**arguments: object) -> None:
    """Measure the reads and writes of the disk tier beside fio, plain and encrypted, and the time in which an index is
    read.

    Without fio the comparison is skipped.
    """
    from tokenlake_bench.disk import DiskArguments, run_disk

    try:
        run_disk(DiskArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("restart")
@click.option("--nodes", default=3, show_default=True, help="Daemons to start on this machine.")
@click.option("--requests", default=120, show_default=True, help="Requests before and after each restart.")
@click.option("--seed", default=0, show_default=True, help="Seed of prompts and bytes.")
@_json
@click.option("--plot", "plot_file", type=_FILE, help="Draw the hit rate over time as this .png file.")
def restart(**arguments: object) -> None:
    """Restart daemons with a disk tier under load, and measure what they find again.

    SIGTERM and kill -9 of each node in turn, then of all nodes at once. Every byte read is compared.
    """
    from tokenlake_bench.restart.command import RestartArguments, run_restart

    try:
        run_restart(RestartArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("growth")
@click.option("--rounds", default=10, show_default=True, help="Repetitions of each row.")
@click.option(
    "--segments",
    default="1000,10000,100000",
    show_default=True,
    help="Numbers of segments that the daemons hold, of 4 KiB each.",
)
@click.option("--clients", default="1,8,64", show_default=True, help="Processes that match at the same time.")
@click.option("--arenas", default="1GiB,4GiB,8GiB", show_default=True, help="Arena sizes of the started daemons.")
@_json
def growth(**arguments: object) -> None:
    """Measure how the cost of a key changes with the keys per call, the clients and the stored segments.

    Also measures the memory and the start time of a daemon.
    """
    from tokenlake_bench.growth.command import GrowthArguments, run_growth

    try:
        run_growth(GrowthArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("churn")
@click.option("--nodes", default=8, show_default=True, help="Daemons at the start.")
@click.option(
    "--change",
    "changes",
    multiple=True,
    type=click.Choice(["join", "drain", "kill", "return", "etcd-down"]),
    help="What happens to a node, or to etcd; repeatable. [default: all]",
)
@click.option("--rounds", default=5, show_default=True, help="Runs of each change; the table has their medians.")
@click.option("--rate", default=10.0, show_default=True, help="Requests per second of each engine; one at each node.")
@click.option(
    "--change-s", default=6.0, show_default=True, help="Least seconds of a change, such as of etcd's absence."
)
@click.option("--encrypt", type=click.Choice(["on", "off"]), default="on", show_default=True, help="With certificates.")
@click.option("--seed", default=0, show_default=True, help="Seed of the first round.")
@_json
@click.option("--plot", "plot_file", type=_FILE, help="Draw the first round over time as this .png file.")
def churn(**arguments: object) -> None:
    """Measure what a change of the cluster costs its engines.

    Real daemons with etcd as membership. A node joins, drains, is killed or returns while engines read and store at all
    nodes; each run has a control run in which nothing happens. Every byte read is compared. Needs etcd.
    """
    from tokenlake_bench.churn.command import CHANGES, ChurnArguments, run_churn

    changes = arguments.pop("changes") or CHANGES
    encrypt = arguments.pop("encrypt") == "on"
    try:
        run_churn(ChurnArguments(changes=changes, encrypt=encrypt, **arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("soak")
@click.option(
    "--minutes", default=2.0, show_default=True, help="Minutes of load; the checks afterwards take one or two more."
)
@click.option("--seed", default=0, show_default=True, help="Seed of prompts, bytes, actions and faults.")
@click.option("--nodes", default=3, show_default=True, help="Daemons to start on this machine.")
@click.option("--rate", default=10.0, show_default=True, help="Actions per second of each engine process.")
@click.option("--fault-every", default=4.0, show_default=True, help="Seconds between two faults, on average.")
@_json
@click.option("--page", "page_file", type=_FILE, help="Write the result to this file, in Markdown.")
def soak(**arguments: object) -> None:
    """Run a mixed load while engines and daemons are killed and stopped; every byte is compared.

    Ends with a verdict on each claim, such as that no byte was wrong; the exit status is 1 unless all claims hold.
    Ctrl-C ends the load early.
    """
    from tokenlake_bench.soak.command import SoakArguments, run_soak

    try:
        result = run_soak(SoakArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if result.passed else 1)


@bench.command("attention")
@click.option("--dtypes", default="float32,bfloat16", show_default=True, help="Element types of the cache.")
@click.option("--tokens", default="4096,32768", show_default=True, help="Tokens of the cache.")
@click.option("--queries", default="1,16,512", show_default=True, help="Query tokens per call.")
@click.option(
    "--nodes", default="1,2,4", show_default=True, help="Numbers of other nodes to query; '' starts no daemons."
)
@click.option("--seconds", default=4.0, show_default=True, help="Approximate time per row.")
@click.option(
    "--processor-time",
    is_flag=True,
    help="Measure processor time of all threads instead of wall time; with OMP_NUM_THREADS=1 a busy machine "
    "disturbs it less. Leaves out the rows of other nodes.",
)
@_json
def attention(**arguments: object) -> None:
    """Measure attention over segments in the pool against torch's fused kernel over one contiguous cache.

    Then measures attention over segments of other nodes, with up to 16 query tokens, against the kernel and a bare
    transfer of as many bytes as the queries and results have. The model has 32 query heads and 8 KV heads of 128. Uses
    up to 1.5 GiB of memory, then five daemons of 320 MiB.
    """
    from tokenlake_bench.attention.command import AttentionArguments, run_attention

    try:
        run_attention(AttentionArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("control-plane")
@click.option("--calls", default=400, show_default=True, help="Calls of each kind.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of matches without calls, and beside calls.")
@click.option("--seconds", default=4.0, show_default=True, help="Duration of a round.")
@click.option("--rate", default=100.0, show_default=True, help="Calls per second beside the matches.")
@_json
def control_plane(calls: int, rounds: int, seconds: float, rate: float, json_file: Path | None) -> None:
    """Time calls of a daemon's control plane against a bare echo, and the matches of an engine beside such calls."""
    from tokenlake_bench.control_plane import run_control_plane

    try:
        run_control_plane(calls, rounds, seconds, rate, json_file)
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("router")
@click.option("--instances", default=2, show_default=True, help="vLLM servers.")
@click.option("--memory-mib", default=64, show_default=True, help="Memory for caches, per instance.")
@click.option("--sessions", default=16, show_default=True, help="Chats; their system prompts are shared.")
@click.option("--turns", default=4, show_default=True, help="Requests of each chat.")
@click.option("--at-once", default=4, show_default=True, help="Chats that are served at the same time.")
@click.option("--seed", default=0, show_default=True, help="Seed of all prompts.")
@click.option("--deadline-ms", default=1000.0, show_default=True, help="The plug-in's setting of this name.")
@click.option(
    "--arrangements",
    default="plugin,litellm-pool,cache-aware,cache-aware-pool,round-robin",
    show_default=True,
    help="plugin: LiteLLM with the plug-in and the pool; litellm-pool: without the plug-in; the others: vLLM's router.",
)
@click.option("--python", type=_FILE, help="Interpreter with vLLM. [default: .venv-vllm's]")
@click.option(
    "--routers",
    type=click.Path(file_okay=False, path_type=Path),
    default=".venv-routers",
    show_default=True,
    help="Environment with the routers (`make install-routers`).",
)
@_json
def router(**arguments: object) -> None:
    """Serve chats with vLLM servers behind LiteLLM with the plug-in, and behind vLLM's router.

    All arrangements have the same memory and get the same requests. Reports hits by source, the time to the first
    token, the balance of computed tokens, and the time that the plug-in adds to a request.
    """
    from tokenlake_bench.router.command import RouterArguments, run_router

    try:
        run_router(RouterArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@bench.command("planner")
@click.option("--bandwidths", default="5,50,2000", show_default=True, help="Bandwidths of the links, in MB/s.")
@click.option(
    "--delays", default="0.05,2", show_default=True, help="Delays that the links add in each direction, in ms."
)
@click.option("--prefixes", default="512,1536,3072", show_default=True, help="Cached tokens, multiples of 256.")
@click.option("--new", default="16,128", show_default=True, help="New tokens behind the prefix.")
@click.option("--decode", default="4,32", show_default=True, help="Generated tokens.")
@click.option("--sharing", default="1,4", show_default=True, help="Requests of a batch that share one prefix.")
@click.option("--turns", default=3, show_default=True, help="Repetitions of each way for each batch.")
@click.option(
    "--minutes", default=60.0, show_default=True, help="Time limit; beyond it, cases to leave out are drawn at random."
)
@_json
@click.option("--plot", "plot_file", type=_FILE, help="Draw the fastest way of each case as this .png file.")
def planner(**arguments: object) -> None:
    """Time every way to use a cached prefix over links of given speeds between real daemons.

    Then computes the planner's regret: how much slower its choices are than the fastest ways.
    """
    from tokenlake_bench.planner.command import PlannerArguments, run_planner

    try:
        run_planner(PlannerArguments(**arguments))  # type: ignore[arg-type]
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error


@click.command()
@_trace
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Directory of a model.")
@_json
def demo(trace: Path | None, model: Path | None, json_file: Path | None) -> None:
    """Run three daemons and two engines on this machine that share one cache; one daemon is killed halfway.

    Ends with a restart of all daemons, which keep their cache on disk.
    """
    from tokenlake_bench.demo import DemoOptions, run_demo

    try:
        run_demo(DemoOptions(trace=trace, model=model, json_file=json_file))
    except TokenLakeError as error:
        raise click.ClickException(str(error)) from error
