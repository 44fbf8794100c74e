"""The settings of a daemon. Each is declared here, or in `rules.py`, and nowhere else."""

from typing import Annotated

from tokenlake.config import kinds
from tokenlake.config.rules import RuleSettings
from tokenlake.config.setting import Setting
from tokenlake.config.values import Peer, Secret, Tenant
from tokenlake.local_socket import DEFAULT_NODE, SYSTEM_DIRECTORY

__all__ = ["ServerConfig"]

_MILLISECONDS = kinds.real(1, 600_000, "milliseconds")
_SIZE = kinds.size(64 << 10, 1 << 50, multiple=kinds.PAGE)


class ServerConfig(RuleSettings, frozen=True, kw_only=True):
    """Sizes are bytes, names end in their unit. Made by `load_config`, which checks it."""

    node: Annotated[
        str,
        Setting(
            kinds.name(),
            "name of this node, the same after every restart",
            why="a single node needs no name of its own; a second node of the same ring is refused until it has one",
        ),
    ] = DEFAULT_NODE
    memory: Annotated[
        int,
        Setting(
            _SIZE,
            "size of the arena; the daemon checks that it is available and touches all of it before it serves",
            why="a few thousand tokens of an 8B model, ready in about two seconds",
        ),
    ] = 1 << 30
    socket: Annotated[
        str,
        Setting(
            # Linux allows 107 bytes in the address of a Unix socket.
            kinds.path("a path of 1 to 107 bytes", longest=107),
            "local socket that engines connect to, mode 0660 ([place and trust](#the-local-socket))",
            why="no other user can put a socket into a runtime directory, and a client looks in all three",
            default="`tokenlake-NODE.sock` in `/run/tokenlake` (root, or a service for which systemd made that "
            "directory), else in `$XDG_RUNTIME_DIR`, else in `/tmp/tokenlake-UID`",
        ),
    ] = f"{SYSTEM_DIRECTORY}/tokenlake-{DEFAULT_NODE}.sock"
    listen: Annotated[
        str,
        Setting(
            kinds.loopback(),
            "address for other daemons; port 0 takes a free one",
            why="loopback only, because connections are authenticated and not encrypted",
        ),
    ] = "127.0.0.1:7440"
    peers: Annotated[
        tuple[Peer, ...],
        Setting(
            kinds.peers(),
            "nodes of the cluster; all nodes may be given the same list, which then contains each of them. Weights in "
            "the ring are the sizes; without sizes all nodes weigh the same",
            why="a pool of one node",
            default="none",
        ),
    ] = ()
    metrics: Annotated[
        str,
        Setting(
            kinds.loopback(optional=True),
            "address of the metrics and health pages, another one for each daemon of a machine; empty turns them off",
            why="every user of this machine can read them, and no other machine",
        ),
    ] = "127.0.0.1:7441"
    region_size: Annotated[
        int,
        Setting(
            _SIZE,
            "memory that changes hands between tenants as one piece; at least one segment",
            why="tens of segments of 1 MiB in each, 16 regions in 1 GiB",
            default="`64MiB`, or `memory` if that is less",
        ),
    ] = 64 << 20
    match_deadline_ms: Annotated[
        float,
        Setting(
            _MILLISECONDS,
            "time that a match waits for other nodes",
            why="less than the recompute of one segment: a longer wait would cost more than the hit saves",
        ),
    ] = 20.0
    suspect_ms: Annotated[
        float,
        Setting(
            _MILLISECONDS,
            "time that a peer may leave a ping unanswered before it is SUSPECT",
            why="ten slow round trips under load; calls in flight wait this long once",
        ),
    ] = 250.0
    max_frame: Annotated[
        int,
        Setting(
            kinds.size(64 << 10, 1 << 30),
            "size of the largest request",
            why="a match over 128K tokens takes under 100 KiB, and segments never travel in a frame",
        ),
    ] = 4 << 20
    huge_pages: Annotated[
        bool,
        Setting(
            kinds.truth(),
            "back the arena with huge pages of 2 MiB",
            why="the administrator must set them aside first",
        ),
    ] = False
    arena_directory: Annotated[
        str,
        Setting(
            kinds.path("an absolute path, or nothing", absolute=True, optional=True),
            "directory for the arena's files; empty: memfd",
            why="a memfd has no name to clean up and no limit by a container's /dev/shm",
        ),
    ] = ""
    allow_uids: Annotated[
        tuple[int, ...],
        Setting(
            kinds.uids(),
            "users that may connect to the socket",
            why="no other user",
            default="the daemon's own",
        ),
    ] = ()
    tenants: Annotated[
        tuple[Tenant, ...],
        Setting(
            kinds.tenants(),
            "`name`, `secret` (hexadecimal, 16 to 64 bytes, the same on every node), `uids`, `tokens` and `quota` (the "
            "largest share of a node's memory that the tenant may have, above 0 to 1, default 1; in whole regions, at "
            "least one) of each tenant; from the file only",
            why="all allowed users are one tenant",
            default="one, `default`",
            secret=True,
        ),
    ] = ()
    cluster_secret: Annotated[
        Secret,
        Setting(
            kinds.secret(),
            "secret of the cluster, of which daemons prove to each other that they know it, the same on all nodes; "
            "from the file or the environment; required where there are `peers` and `tenants`",
            why="one tenant has no other tenant to hide from",
            default="none",
            secret=True,
        ),
    ] = Secret()
    query_engine: Annotated[
        bool,
        Setting(
            kinds.truth(),
            "run a query engine beside the daemon, which computes attention over segments where they lie; needs "
            "`pip install 'tokenlake[query]'`",
            why="it needs torch, and takes memory bandwidth and processors that engines of this node may want",
        ),
    ] = False
    record: Annotated[
        str,
        Setting(
            kinds.path("a path, or nothing", optional=True),
            "file for an event log",
            why="the log grows without bound; it is for finding faults",
        ),
    ] = ""
    state_directory: Annotated[
        str,
        Setting(
            kinds.path("an absolute path, or nothing", absolute=True, optional=True),
            "existing directory for the file `learned-NODE`, which holds the statistics of the policy of eviction over "
            "a restart; empty: nothing outlives the process",
            why="statistics that are learned again within minutes are not worth guessing a directory that is writable, "
            "survives a restart and belongs to this node alone",
        ),
    ] = ""
    log_level: Annotated[
        str,
        Setting(
            kinds.one_of("debug", "info", "warning", "error"),
            "least level of the log; debug has a line per request, under the name that engine and daemons call it",
            why="a line costs more than many a request",
        ),
    ] = "info"
