"""The settings of a daemon. Each is declared only here or in `rules.py`."""

from typing import Annotated, Literal

from msgspec import Meta

from tokenlake.config.kinds import (
    AbsolutePath,
    AddressText,
    Cluster,
    ColdPlace,
    ColdSize,
    CollectorUrl,
    Disks,
    Endpoints,
    KvEvents,
    Name,
    OptionalAddress,
    OptionalSocketPath,
    Password,
    Path,
    Peers,
    Secrets,
    Size,
    SocketPath,
    Tenants,
    Uids,
)
from tokenlake.config.rules import RuleSettings
from tokenlake.config.setting import Setting
from tokenlake.config.values import Secret
from tokenlake.wire.local_socket import DEFAULT_NODE, SYSTEM_DIRECTORY

Milliseconds = Annotated[float, Meta(ge=1, le=600_000, description="milliseconds")]


class ServerConfig(RuleSettings, frozen=True, kw_only=True):
    """Sizes are in bytes; names of other quantities end in their unit. Made by `load_config`."""

    node: Annotated[
        Name,
        Setting(
            "name of this node, the same after every restart",
            why="enough for a single node; each of several nodes needs its own name",
        ),
    ] = DEFAULT_NODE
    memory: Annotated[
        Size,
        Setting(
            "size of the arena; the daemon checks that it is available and populates all of it before it serves",
            why="32,768 tokens of an 8B model, or 13,056 of a 70B one",
        ),
    ] = 4 << 30
    socket: Annotated[
        SocketPath,
        Setting(
            "local socket that engines connect to, mode 0660 ([place and trust](#the-local-socket))",
            why="other users cannot create files in a runtime directory, and clients look in all three",
            default="`tokenlake-NODE.sock` in `/run/tokenlake` (root, or a service for which systemd made that "
            "directory), else in `$XDG_RUNTIME_DIR`, else in `/tmp/tokenlake-UID`",
        ),
    ] = f"{SYSTEM_DIRECTORY}/tokenlake-{DEFAULT_NODE}.sock"
    listen: Annotated[
        AddressText,
        Setting(
            "address for other daemons; port 0 chooses a free port; beyond loopback only with `certificate`",
            why="loopback, because without certificates connections are not encrypted",
        ),
    ] = "127.0.0.1:7440"
    peers: Annotated[
        Peers,
        Setting(
            "nodes of the pool; all nodes may be given the same list, which then contains this node too. The sizes are "
            "the weights in the ring; without sizes all nodes have the same weight",
            why="no peers: a single node",
            default="none",
        ),
    ] = ()
    advertise: Annotated[
        OptionalAddress,
        Setting(
            "address at which other nodes reach this one, where it differs from `listen` (NAT, containers); other "
            "nodes read it from etcd or from `peers`, where the entry of this node must have it",
            why="most nodes are reached where they listen",
            default="`listen`",
        ),
    ] = ""
    bulk_listen: Annotated[
        Endpoints,
        Setting(
            "further addresses of this machine at which other nodes read segments, one for each further network "
            "interface: IP addresses with ports, at most 8; reads spread over them and `listen`",
            why="most machines have one network interface for the pool",
            default="none",
        ),
    ] = ()
    etcd: Annotated[
        Endpoints,
        Setting(
            "endpoints of the etcd that stores the members, in place of `peers`; etcd 3.5.13 or later",
            why="a laptop needs no etcd",
            default="none",
        ),
    ] = ()
    etcd_ca: Annotated[
        Path,
        Setting(
            "file with the certificates that may sign etcd's, in PEM; with it connections to etcd use TLS",
            why="etcd on loopback needs none",
        ),
    ] = ""
    etcd_certificate: Annotated[
        Path,
        Setting(
            "file with the certificate by which etcd knows this node, in PEM",
            why="etcd asks for one only with `--client-cert-auth`",
        ),
    ] = ""
    etcd_key: Annotated[
        Path,
        Setting("file with the key of `etcd_certificate`", why="as there"),
    ] = ""
    etcd_user: Annotated[
        Annotated[str, Meta(max_length=256, description="a name, or nothing")],
        Setting(
            "user of etcd, where its authentication is on; it needs the keys below `/tokenlake/CLUSTER/`",
            why="etcd has no users at first",
        ),
    ] = ""
    etcd_password: Annotated[
        Password,
        Setting(
            "password of `etcd_user`; from the file or the environment",
            why="as there",
            default="none",
            secret=True,
        ),
    ] = Secret()
    drain_s: Annotated[
        float,
        Meta(ge=0, le=86_400, description="seconds"),
        Setting(
            "limit of the time in which this node hands its segments over before it leaves the ring. Above 0, SIGTERM "
            "lets the node leave; at 0 it ends the daemon at once, the node stays a member, and `tokenlake drain` has "
            "a limit of 60 s. Needs `etcd`",
            why="most ends of a daemon are restarts, after which the node takes its place again",
        ),
    ] = 0.0
    metrics: Annotated[
        OptionalAddress,
        Setting(
            "address of the metrics and health pages, another one for each daemon of a machine; empty turns them off. "
            "The pages can only be read, by everyone who reaches the address",
            why="other machines cannot read the pages; every user of this machine can",
        ),
    ] = "127.0.0.1:7441"
    metrics_tenants: Annotated[
        bool,
        Setting(
            "show the names of tenants on the metrics page also where `metrics` is no loopback address; otherwise "
            "tenants are shown there by their number in the list",
            why="names of tenants may be names of customers",
        ),
    ] = False
    control: Annotated[
        OptionalAddress,
        Setting(
            "address of the control plane (gRPC) for other machines, with mutual TLS: callers need a certificate with "
            "a role ([roles](operations/control-plane.md)); needs `certificate`",
            why="most nodes are operated over their own socket",
        ),
    ] = ""
    control_socket: Annotated[
        OptionalSocketPath,
        Setting(
            "Unix socket of the control plane (gRPC) for the operator of this node: mode 0600, for the daemon's user "
            "and root; empty turns it off",
            why="beside the socket of engines",
            default="`socket`, with `.control` in place of `.sock`",
        ),
    ] = f"{SYSTEM_DIRECTORY}/tokenlake-{DEFAULT_NODE}.control"
    region_size: Annotated[
        Size,
        Setting(
            "size of the parts of memory (regions) that pools of tenants and models get, rounded to whole segments",
            why="a pool that needs memory gets about a 64th of it at a time, and a large node has few descriptors open",
            default="`memory` / 64, at least `64MiB`, at most `1GiB` or `memory` / 512",
        ),
    ] = 64 << 20
    match_deadline_ms: Annotated[
        Milliseconds,
        Setting(
            "time that a match waits for answers of other nodes, beside 20 us for each segment of the prompt",
            why="computing one segment takes longer than this, so that a wait costs less than a miss",
        ),
    ] = 20.0
    suspect_ms: Annotated[
        Milliseconds,
        Setting(
            "time without an answer to a ping after which a peer is SUSPECT",
            why="ten slow round trips under load",
        ),
    ] = 250.0
    disk: Annotated[
        Disks,
        Setting(
            "devices of the disk tier: an existing directory of each, for this node alone, and the most bytes that it "
            "may take, else 95 % of the free space ([the disk tier](operations/disk.md))",
            why="no directory is known to be on a fast device; caches on disk outlive the daemon",
            default="none",
        ),
    ] = ()
    disk_keys: Annotated[
        Secrets,
        Setting(
            "keys that encrypt the segments in `disk`, from the file or the environment: the first one for new "
            "segments, each for those that were written with it; without keys segments are not encrypted",
            why="the files are readable for the daemon's user only; a key beside them protects a device that is sold "
            "or stolen, and costs processor time",
            default="none",
            secret=True,
        ),
    ] = ()
    disk_save_s: Annotated[
        float,
        Meta(ge=0, le=3600, description="seconds"),
        Setting(
            "limit of the time in which SIGTERM lets the daemon write segments to `disk` that are in memory only; at 0 "
            "they are lost",
            why="Kubernetes and systemd kill a daemon that takes longer than 30 or 90 s to end",
        ),
    ] = 10.0
    keep_s: Annotated[
        float,
        Meta(ge=0, le=86_400, description="seconds"),
        Setting(
            "time for which a small process, the keeper, keeps the memory after the daemon ended, so that the next "
            "daemon goes on with it; at 0 memory ends with the daemon, unless systemd keeps it "
            "([memory over restarts](operations/memory-over-restarts.md))",
            why="without a daemon the memory is free at once",
        ),
    ] = 0.0
    cold: Annotated[
        ColdPlace,
        Setting(
            "the cold tier, which nodes and clusters share: an existing directory, such as one of NFS, or "
            "`s3://BUCKET/PREFIX`, with the credentials of the usual `AWS_` variables and "
            "`pip install 'tokenlake[s3]'` ([the cold tier](operations/cold-tier.md))",
            why="no place is known that all nodes reach",
            default="none",
        ),
    ] = ""
    cold_size: Annotated[
        ColdSize,
        Setting(
            "most bytes of all objects in `cold`, whichever nodes wrote them; the same on all nodes",
            why="a place that nodes share needs a limit; a busy node may write that much within an hour",
        ),
    ] = 1 << 40
    cold_days: Annotated[
        float,
        Meta(ge=0.04, le=3650, description="days"),
        Setting(
            "days after which an object in `cold` that no node read expires",
            why="conversations that go on later are rare, and prompts are not kept longer than they are of use",
        ),
    ] = 14.0
    huge_pages: Annotated[
        bool,
        Setting(
            "back the arena with huge pages of 2 MiB; not with several tenants, of which one could end the daemon",
            why="the administrator must reserve huge pages first",
        ),
    ] = False
    allow_uids: Annotated[
        Uids,
        Setting(
            "users that may connect to the socket; a list replaces the default",
            why="only the daemon's user",
            default="the daemon's own",
        ),
    ] = ()
    tenants: Annotated[
        Tenants,
        Setting(
            "tenants, each with `name`, `secret` (16 to 64 bytes in hexadecimal, the same on every node), `uids`, "
            "`tokens`, `quota` (limit of its share of a node's memory, above 0 to 1, default 1; at least one region) "
            "and `salt_quota` (limit of the share of that memory for the requests with one salt, above 0 to 1, default "
            "1); from the file only ([example](operations/tenants.md))",
            why="all allowed users belong to one tenant",
            default="one, `default`",
            secret=True,
        ),
    ] = ()
    kv_events: Annotated[
        KvEvents,
        Setting(
            "streams of KV events for routers, each with `model`, `endpoint`, `replay`, `tenant`, `topic`, "
            "`block_tokens`, `medium`, `encoding`, `uids` and `beyond_loopback`: they show the tokens of prompts; from "
            "the file only ([example](operations/routers.md))",
            why="the tokens of prompts stay in the pool",
            default="none",
            secret=True,
        ),
    ] = ()
    cluster: Annotated[
        Cluster,
        Setting(
            "name of the cluster, the same on all nodes; nodes of different clusters refuse each other; part of the "
            "identity in certificates",
            why="enough where there is one cluster",
        ),
    ] = "tokenlake"
    certificate: Annotated[
        Path,
        Setting(
            "PEM file with the certificate of this node, for the URI `spiffe://CLUSTER/tokenlake/node/NODE`, and any "
            "intermediate certificates; with `key` and `ca` all connections between nodes are encrypted "
            "([certificates](operations/certificates.md))",
            why="on loopback the cluster secret is enough",
        ),
    ] = ""
    key: Annotated[
        Path,
        Setting(
            "PEM file with the private key of `certificate`, which other users cannot read",
            why="see `certificate`",
        ),
    ] = ""
    ca: Annotated[
        Path,
        Setting(
            "PEM file with the certificates of the authorities (CAs) that sign the certificates of nodes, one or more",
            why="see `certificate`",
        ),
    ] = ""
    unencrypted_beyond_loopback: Annotated[
        bool,
        Setting(
            "accept and open plain connections with other machines although there is no `certificate`: every machine "
            "on the way can read and change all caches",
            why="a cache holds the content of prompts",
        ),
    ] = False
    transport: Annotated[
        Literal["auto", "tcp", "nixl"],
        Setting(
            "how the bytes of segments come from other nodes: `tcp`, or with NIXL (RDMA) where both nodes have it and "
            "have an RDMA network, or a machine, in common, and TCP elsewhere. `auto` uses NIXL where it is installed; "
            "`nixl` refuses to start without it. NIXL needs `fabric`",
            why="TCP reaches all nodes",
        ),
    ] = "auto"
    fabric: Annotated[
        Literal["untrusted", "trusted"],
        Setting(
            "`trusted`: everyone on the network by which memory can be read may read all caches of this node. NIXL is "
            "used only then, since it does not encrypt, also with a `certificate`",
            why="a cache holds the content of prompts",
        ),
    ] = "untrusted"
    cluster_secret: Annotated[
        Secrets,
        Setting(
            "secrets by which daemons without `certificate` authenticate each other, from the file or the environment: "
            "the first one proves this node, and each is accepted from others; required with `peers` and `tenants` "
            "where there is no `certificate`",
            why="with a single tenant no cache has to be protected from other tenants",
            default="none",
            secret=True,
        ),
    ] = ()
    query_engine: Annotated[
        bool,
        Setting(
            "run a query engine, a process that computes attention over the segments of this node; needs "
            "`pip install 'tokenlake[query]'`",
            why="it needs torch, and shares memory bandwidth and processors with the engines of this node",
        ),
    ] = False
    state_directory: Annotated[
        AbsolutePath,
        Setting(
            "existing directory for the file `orders-NODE`, which keeps evictions and retired weights over a restart "
            "([where else](operations/disk.md#evictions-and-retired-weights))",
            why="no directory is known to be writable, permanent and this node's own",
        ),
    ] = ""
    otlp: Annotated[
        CollectorUrl,
        Setting(
            "URL of an OpenTelemetry collector, such as `http://collector:4318`, to which this node sends spans of "
            "requests with a sampled trace, as OTLP over HTTP ([tracing](operations/tracing.md)); needs "
            "`pip install 'tokenlake[tracing]'`",
            why="no collector is known, and without one nothing is traced",
            default="none",
        ),
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting(
            "least level of the messages that are logged; debug logs each request with its name",
            why="logging a line takes longer than many requests",
        ),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Setting(
            "form of the log on stderr: a line of text, or a JSON object, for each message "
            "([the log](operations/logs.md))",
            why="people read it first",
        ),
    ] = "text"

    @property
    def regions(self) -> int:
        """The number of regions into which `memory` is divided at first."""
        return -(-self.memory // self.region_size)
