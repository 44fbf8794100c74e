"""A connection to the control plane of one daemon: typed calls, and errors of TokenLake in place of gRPC's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

# gRPC's core would write several lines to stderr for each refused connection. The errors of calls say as much.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from tokenlake.errors import (
    ConfigurationError,
    CredentialRefused,
    DeadlinePassed,
    LimitReached,
    MembershipRefused,
    ProtocolRefused,
    Refused,
    TokenLakeError,
    Unreachable,
)
from tokenlake.identity import SegmentKey
from tokenlake.wire.slots import join_keys
from tokenlake_client.dial import dial
from tokenlake_proto.v1 import admin_pb2, events_pb2, scheduling_pb2
from tokenlake_proto.v1.admin_pb2_grpc import AdminStub
from tokenlake_proto.v1.events_pb2_grpc import EventsStub
from tokenlake_proto.v1.scheduling_pb2_grpc import SchedulingStub

Reply = TypeVar("Reply")

CALL_S = 2.0
"""Default limit of the seconds of a call."""
CHANGE_S = 15.0
"""Limit of the seconds of a call that waits for etcd."""
_TOKEN_KEY = "tokenlake-credential"
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
]


class Certificates(NamedTuple):
    """The files (PEM) of mutual TLS between a caller and a daemon."""

    certificate: Path
    """The caller's certificate, whose URI states its role (`tokenlake ca issue --role`)."""
    key: Path
    ca: Path


class CursorLost(Refused):
    """The log of events does not reach back to the cursor any more, or the daemon was started again: read a
    snapshot."""


_ERRORS: dict[grpc.StatusCode, type[TokenLakeError]] = {
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.PERMISSION_DENIED: CredentialRefused,
    grpc.StatusCode.UNAUTHENTICATED: CredentialRefused,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitReached,
    grpc.StatusCode.FAILED_PRECONDITION: MembershipRefused,
    grpc.StatusCode.OUT_OF_RANGE: CursorLost,
    grpc.StatusCode.INTERNAL: ProtocolRefused,
    grpc.StatusCode.UNKNOWN: ProtocolRefused,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolRefused,
}


class Control:
    """A connection to the control plane of one daemon. May be used by several threads. Every method raises
    `Unreachable`, `DeadlinePassed`, and the reason for which the daemon refuses: `CredentialRefused` without the role
    or the tenant, `LimitReached`, `MembershipRefused`, `Refused` for arguments that are not valid."""

    def __init__(self, channel: grpc.Channel, target: str, token: str | None = None, call_s: float = CALL_S) -> None:
        """`channel`: owned by this object. `target`: for errors. `token`: of a tenant. `call_s`: limit of the seconds
        of a call. Use `local` or `connect`."""
        self._channel = channel
        self._target = target
        self._call_s = call_s
        self._metadata: tuple[tuple[str, str | bytes], ...] | None = ((_TOKEN_KEY, token),) if token else None
        self._scheduling = SchedulingStub(channel)
        self._admin = AdminStub(channel)
        self._events = EventsStub(channel)

    @classmethod
    def local(
        cls, path: Path | str, token: str | None = None, *, daemon_uid: int | None = None, call_s: float = CALL_S
    ) -> Control:
        """Connect to the Unix socket of a daemon on this machine. `daemon_uid`: the user that the daemon runs as, where
        that is neither root nor this process's user. Raises `Unreachable`; `ListenerUntrusted` where another user
        listens, or could."""
        # gRPC does not tell the user of the listening process. A listener of another user cannot take the place of the
        # one that is checked here: `dial` also refuses a path that other users can change.
        sock, _ = dial(Path(path), daemon_uid, call_s, by_path=True)
        sock.close()
        return cls(grpc.insecure_channel(f"unix:{os.path.abspath(path)}", _OPTIONS), str(path), token, call_s)

    @classmethod
    def connect(
        cls, address: str, node: str, files: Certificates, token: str | None = None, *, call_s: float = CALL_S
    ) -> Control:
        """Connect to the daemon of `node` at `address` (host:port) with mutual TLS. The name in its certificate must be
        `node`. Raises `ConfigurationError` for a file that cannot be read."""
        content: dict[str, bytes] = {}
        for name, path in files._asdict().items():
            try:
                content[name] = Path(path).read_bytes()
            except OSError as error:
                raise ConfigurationError(name, str(path), f"a file that can be read ({error.strerror})") from error
        credentials = grpc.ssl_channel_credentials(content["ca"], content["key"], content["certificate"])
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", node)]
        return cls(grpc.secure_channel(address, credentials, options), address, token, call_s)

    # -- states

    def status(self) -> admin_pb2.GetStatusResponse:
        """The state of the node."""
        return self._ask(self._admin.GetStatus, admin_pb2.GetStatusRequest())

    def cluster(self) -> admin_pb2.GetClusterResponse:
        """The members of the cluster, as the node knows them."""
        return self._ask(self._admin.GetCluster, admin_pb2.GetClusterRequest())

    def config(self) -> list[admin_pb2.Setting]:
        """Each setting of the node, its value and its source."""
        return list(self._ask(self._admin.GetConfig, admin_pb2.GetConfigRequest()).settings)

    def explain(self, request: str, tenant: str = "") -> admin_pb2.ExplainResponse:
        """The account of how a request used the pool. `request`: its name, or the beginning of it; empty: the newest
        requests are listed. `tenant`: the request's tenant; only an admin may name another tenant than its own."""
        return self._ask(self._admin.Explain, admin_pb2.ExplainRequest(request=request, tenant=tenant))

    def engines(self) -> list[admin_pb2.Engines]:
        """The connected engines of all tenants, by layout."""
        return list(self._ask(self._admin.GetEngines, admin_pb2.GetEnginesRequest()).engines)

    def activity(self, count: int = 0) -> admin_pb2.GetActivityResponse:
        """The hot prefixes and the slowest calls among the newest requests of the node; `count` of each."""
        return self._ask(self._admin.GetActivity, admin_pb2.GetActivityRequest(count=count))

    def grant_page(self, valid_s: float = 0.0, tenant: str = "") -> admin_pb2.GrantPageResponse:
        """A token for the page of the node, and its address. `valid_s`: seconds, 0 for 8 hours. `tenant`: the only one
        that is shown; empty for all that the caller may see."""
        return self._ask(self._admin.GrantPage, admin_pb2.GrantPageRequest(valid_s=valid_s, tenant=tenant))

    def measure(self, node: str, max_bytes: int = 0, max_s: float = 0.0) -> list[admin_pb2.Path]:
        """Measure the paths from `node` to the node that is asked, with at most `max_bytes` (0: 256 MiB) in at most
        `max_s` (0: 1 s)."""
        message = admin_pb2.MeasurePeerRequest(node=node, max_bytes=max_bytes, max_s=max_s)
        return list(self._ask(self._admin.MeasurePeer, message, CHANGE_S).paths)

    # -- changes

    def drain(self, node: str = "", *, wait: bool = False) -> None:
        """Let a node leave; empty for the one that is asked. `wait`: the caller reads the account of the drain by
        `cluster`, so that a node that is asked itself ends up to 2 s later."""
        self._ask(self._admin.Drain, admin_pb2.DrainRequest(node=node, wait=wait), CHANGE_S)

    def remove(self, node: str) -> None:
        """Remove a node that is gone for good."""
        self._ask(self._admin.Remove, admin_pb2.RemoveRequest(node=node), CHANGE_S)

    def evict(
        self,
        *,
        keys: Sequence[SegmentKey] | None = None,
        segment_bytes: int = 0,
        everything: bool = False,
        tenant: str = "",
    ) -> admin_pb2.EvictResponse:
        """Evict segments of the node: those of `keys`, those of one size (of a layout), or all of the tenant. The
        answer has their number (`evicted`), and names the devices that could not be reached (`unremoved`)."""
        message = admin_pb2.EvictRequest(tenant=tenant)
        if keys is not None:
            message.keys = join_keys(list(keys))
        elif segment_bytes:
            message.segment_bytes = segment_bytes
        elif everything:
            message.all = True
        return self._ask(self._admin.Evict, message, CHANGE_S)

    def weights_changed(self, weights_digest: str, tenant: str = "") -> admin_pb2.WeightsChangedResponse:
        """The weights that this digest names have changed in place: end the sessions of engines with it."""
        message = admin_pb2.WeightsChangedRequest(tenant=tenant, weights_digest=weights_digest)
        return self._ask(self._admin.WeightsChanged, message, CHANGE_S)

    # -- events

    def events(self, after: events_pb2.Cursor | None = None) -> Generator[events_pb2.SubscribeResponse, None, None]:
        """The changes of the node's segments and of the ring, without end: behind `after`, or a snapshot first. Raises
        `CursorLost` where the log does not reach back to the cursor. `close` ends the stream."""
        stream = self._events.Subscribe(events_pb2.SubscribeRequest(after=after), metadata=self._metadata)
        try:
            with self._errors():
                yield from stream
        finally:
            stream.cancel()

    # -- scheduling

    def layouts(self) -> list[scheduling_pb2.Layout]:
        """The layouts of the tenant's engines that have connected to the node, the newest last."""
        return list(self._ask(self._scheduling.GetLayouts, scheduling_pb2.GetLayoutsRequest()).layouts)

    def prefix_tree(self, message: scheduling_pb2.GetPrefixTreeRequest) -> scheduling_pb2.GetPrefixTreeResponse:
        """The cached prefixes of some prompts."""
        return self._ask(self._scheduling.GetPrefixTree, message)

    def cache_load(self, message: scheduling_pb2.GetCacheLoadRequest) -> dict[str, float]:
        """The share of each node's time that attention over cached segments takes."""
        return dict(self._ask(self._scheduling.GetCacheLoad, message).load)

    def plans(self, message: scheduling_pb2.GenPlansRequest) -> list[scheduling_pb2.Plan]:
        """The plan of each batch."""
        return list(self._ask(self._scheduling.GenPlans, message).plans)

    def start(self, message: scheduling_pb2.GetStartRequest) -> scheduling_pb2.GetStartResponse:
        """The instance where a request starts soonest."""
        return self._ask(self._scheduling.GetStart, message)

    def report(self, message: scheduling_pb2.ReportRequest) -> int:
        """Tell what happened to requests of a fleet. Returns the number of its requests under way."""
        return self._ask(self._scheduling.Report, message).under_way

    def hint(self, message: scheduling_pb2.HintRequest) -> None:
        """Give hints about the segments of a prompt."""
        self._ask(self._scheduling.Hint, message)

    def prefetch(self, message: scheduling_pb2.PrefetchRequest) -> scheduling_pb2.PrefetchResponse:
        """Bring the segments of a prompt to the memory of the node, and pin them there if the message says so."""
        return self._ask(self._scheduling.Prefetch, message, CHANGE_S)

    def unpin(self, message: scheduling_pb2.UnpinRequest) -> int:
        """End pins of the node: those of a prompt, or all of the tenant. Returns the number of segments."""
        return self._ask(self._scheduling.Unpin, message, CHANGE_S).unpinned

    # -- the connection

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, method: Callable[..., Reply], message: object, seconds: float = 0.0) -> Reply:
        """Call a method of the daemon, and return its reply. The call is given up after `seconds`, or `call_s` if that
        is longer."""
        with self._errors():
            return method(message, timeout=max(self._call_s, seconds), metadata=self._metadata)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            # Every error of a call is one of its status as well, which the stubs of gRPC do not say.
            status: Any = error
            kind = _ERRORS.get(status.code(), Refused)
            raise kind(f"{self._target}: {status.details() or status.code().name}") from error
