"""A connection to one member of etcd: the calls that a membership makes, over gRPC.

The messages are a subset of etcd's (`etcd_subset.proto`), and methods are named by their literal paths, so that no
package of etcd's API is needed. In the membership, only this module uses gRPC.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

# gRPC's core would write several lines to stderr for each refused connection. The errors of calls say as much.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import grpc.aio

from tokenlake.config import Address, Secret, ServerConfig
from tokenlake.errors import ConfigurationError, CredentialRefused, MembershipRefused, TokenLakeError, Unreachable
from tokenlake_server.membership import etcd_subset_pb2 as pb

CALL_S = 2.0
"""Seconds that a call may take. A frozen member of etcd answers nothing, so the next one is asked after this time."""
PROGRESS_S = 1.0
"""Seconds without a message on a watch after which progress is requested, which a living member answers at once."""
PAUSE_S = 0.1
"""Seconds between two attempts to reach etcd. Each attempt goes to the next endpoint."""
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    # A channel is used for one attempt; it must not share the connection, and the pause, of a former one.
    ("grpc.use_local_subchannel_pool", 1),
]

T = TypeVar("T")


class Access(NamedTuple):
    """How etcd is reached: the settings `etcd` and `etcd_*`."""

    endpoints: tuple[Address, ...]
    ca: str = ""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password: Secret = Secret()

    @classmethod
    def of(cls, config: ServerConfig) -> Access:
        """The access that the settings give."""
        files = (config.etcd_ca, config.etcd_certificate, config.etcd_key)
        return cls(config.etcd, *files, config.etcd_user, config.etcd_password)

    def __str__(self) -> str:
        return "etcd at " + ", ".join(map(str, self.endpoints))


class Read(NamedTuple):
    """One key with its value. `mod_revision`: the revision of etcd at which it was written last."""

    key: bytes
    value: bytes
    mod_revision: int
    lease: int


class Put(NamedTuple):
    """A key to write. `lease`: 0 for none."""

    key: bytes
    value: bytes
    lease: int = 0


class Etcd:
    """One gRPC channel to one endpoint. Used on one loop. Calls raise `Unreachable` where the endpoint does not answer
    in time, `CredentialRefused` where it refuses the user or the certificate, and `MembershipRefused` where it refuses
    the request."""

    def __init__(self, access: Access, endpoint: Address) -> None:
        """Raises `ConfigurationError` for a file that cannot be read. The files are read for each connection, so that
        new certificates are used without a restart."""
        self._access = access
        self._endpoint = endpoint
        self._metadata: tuple[tuple[str, str], ...] = ()
        if access.ca:
            ca, certificate, key = _file("etcd_ca", access.ca), None, None
            if access.certificate:
                certificate, key = _file("etcd_certificate", access.certificate), _file("etcd_key", access.key)
            credentials = grpc.ssl_channel_credentials(ca, key, certificate)
            self._channel = grpc.aio.secure_channel(str(endpoint), credentials, _OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(str(endpoint), _OPTIONS)

    async def __aenter__(self) -> Etcd:
        """Authenticate, if the settings name a user. The first call makes the connection."""
        if self._access.user:
            await self._authenticate()
        return self

    async def _authenticate(self) -> None:
        self._metadata = ()
        request = pb.AuthenticateRequest(name=self._access.user, password=self._access.password.decode())
        reply = await self._call("Auth/Authenticate", request, pb.AuthenticateResponse)
        self._metadata = (("token", reply.token),)

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    async def read(self, prefix: bytes) -> list[Read]:
        """All keys that begin with `prefix`, as the majority of etcd's members knows them."""
        request = pb.RangeRequest(key=prefix, range_end=prefix[:-1] + bytes([prefix[-1] + 1]))
        reply = await self._call("KV/Range", request, pb.RangeResponse)
        return [Read(kv.key, kv.value, kv.mod_revision, kv.lease) for kv in reply.kvs]

    async def write(self, unchanged: Mapping[bytes, int], puts: Sequence[Put], deletes: Sequence[bytes] = ()) -> bool:
        """Write and delete keys, all or none: only if each key of `unchanged` still has this `mod_revision` (0: it does
        not exist). Returns whether it was done. A call that raises may have been done, or may be done seconds later;
        the condition keeps it from replacing a newer value."""
        compare = [
            pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=key, mod_revision=revision)
            for key, revision in unchanged.items()
        ]
        success = [pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=at)) for key, value, at in puts]
        success += [pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key)) for key in deletes]
        reply = await self._call("KV/Txn", pb.TxnRequest(compare=compare, success=success), pb.TxnResponse)
        return reply.succeeded

    async def grant(self, ttl_s: int) -> int:
        """A new lease of `ttl_s` seconds."""
        return (await self._call("Lease/LeaseGrant", pb.LeaseGrantRequest(ttl=ttl_s), pb.LeaseGrantResponse)).id

    async def keep(self, lease: int) -> bool:
        """Renew a lease. False: it has ended."""
        stream = self._stream("Lease/LeaseKeepAlive", pb.LeaseKeepAliveResponse)
        try:
            reply = await self._within(_ask(stream, pb.LeaseKeepAliveRequest(id=lease)))
        finally:
            stream.cancel()
        if reply is grpc.aio.EOF:
            raise Unreachable(f"etcd at {self._endpoint} ended the renewal of a lease")
        return bool(reply.ttl > 0)

    async def revoke(self, lease: int) -> None:
        """End a lease, which deletes its keys. Nothing happens if it has ended."""
        await self._call("Lease/LeaseRevoke", pb.LeaseRevokeRequest(id=lease), pb.LeaseRevokeResponse)

    async def watch(self, prefix: bytes) -> AsyncIterator[None]:
        """Yields once when the watch has begun, and then after each change below `prefix`. Raises `Unreachable` when
        the stream ends, or when the endpoint does not answer a request for progress within `CALL_S`."""
        stream = self._stream("Watch/Watch", pb.WatchResponse)
        reading: asyncio.Task[Any] | None = None
        try:
            create = pb.WatchCreateRequest(key=prefix, range_end=prefix[:-1] + bytes([prefix[-1] + 1]))
            await self._within(stream.write(pb.WatchRequest(create_request=create)))
            silent = False
            while True:
                reading = reading or asyncio.ensure_future(stream.read())
                done, _ = await asyncio.wait({reading}, timeout=CALL_S if silent else PROGRESS_S)
                if not done and silent:
                    raise Unreachable(f"etcd at {self._endpoint} is silent on a watch")
                if not done:
                    silent = True
                    request = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
                    await self._within(stream.write(request))
                    continue
                silent = False
                reply = await self._within(reading)
                reading = None
                if reply is grpc.aio.EOF:
                    raise Unreachable(f"etcd at {self._endpoint} ended a watch")
                if reply.canceled:
                    raise Unreachable(f"etcd at {self._endpoint} cancelled a watch: {reply.cancel_reason}")
                if reply.created or reply.events:
                    yield None
        finally:
            if reading is not None:
                reading.cancel()
            stream.cancel()

    def _stream(self, path: str, reply: Any) -> Any:
        # 'hasleader': the member ends the stream when it has lost the leader, so that another one is asked.
        method: Any = self._channel.stream_stream(
            f"/etcdserverpb.{path}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,
        )
        return method(metadata=(*self._metadata, ("hasleader", "true")))

    async def _call(self, path: str, request: Any, reply: type[T]) -> T:
        method: Any = self._channel.unary_unary(
            f"/etcdserverpb.{path}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply.FromString,  # type: ignore[attr-defined]
        )
        try:
            return await self._within(method(request, timeout=CALL_S, metadata=self._metadata))  # type: ignore[no-any-return]
        except CredentialRefused:
            if not self._metadata:
                raise
        # A token ends when no call was made for 5 minutes; the watch and the renewal of the lease are none.
        await self._authenticate()
        return await self._within(method(request, timeout=CALL_S, metadata=self._metadata))  # type: ignore[no-any-return]

    async def _within(self, awaitable: Any) -> Any:
        """The result of a gRPC operation. Its errors become the project's."""
        try:
            async with asyncio.timeout(CALL_S):
                return await awaitable
        except TimeoutError:
            raise Unreachable(f"etcd at {self._endpoint} did not answer within {CALL_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from None
        except asyncio.InvalidStateError as error:  # a write to a stream that has ended
            raise Unreachable(f"etcd at {self._endpoint} ended a stream") from error

    def _error(self, error: grpc.aio.AioRpcError) -> TokenLakeError:
        code, text = error.code(), f"etcd at {self._endpoint}: {error.details() or error.code().name}"
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return CredentialRefused(text)
        if code is grpc.StatusCode.INVALID_ARGUMENT and self._access.user:
            return CredentialRefused(f"{text} (user '{self._access.user}')")
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            return MembershipRefused(text)
        return Unreachable(text)


async def _ask(stream: Any, request: Any) -> Any:
    await stream.write(request)
    return await stream.read()


def _file(setting: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(setting, path, f"a file that can be read ({error.strerror})") from error


async def on_any(access: Access, work: Callable[[Etcd], Awaitable[T]], deadline_s: float) -> T:
    """The result of `work` with the first endpoint that answers, tried in turn until `deadline_s` has passed. Raises
    the error of the last attempt; an error that is not `Unreachable` at once."""
    until = asyncio.get_running_loop().time() + deadline_s
    at = random.randrange(len(access.endpoints))
    while True:
        try:
            async with Etcd(access, access.endpoints[at % len(access.endpoints)]) as etcd:
                return await work(etcd)
        except Unreachable:
            if asyncio.get_running_loop().time() >= until:
                raise
        at += 1
        await asyncio.sleep(PAUSE_S)
