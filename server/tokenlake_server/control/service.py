"""Wraps the functions of the services for gRPC: checks the role, limits calls and messages, decodes the message, limits
the time, and turns errors into status codes.

Every method is served as a stream of messages in both directions, which on the wire is the same: so a message is read
when there is room for it, and a reply counts until the caller has taken it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tokenlake.errors import (
    ConfigurationError,
    CredentialRefused,
    LimitReached,
    MembershipRefused,
    Refused,
    Unreachable,
)
from tokenlake_proto.v1 import role_pb2
from tokenlake_server.control.call_log import CallLog
from tokenlake_server.control.callers import Caller, Callers
from tokenlake_server.control.limits import Call, Calls
from tokenlake_server.control.parts import count_parts
from tokenlake_server.control.work import Work

log = logging.getLogger(__name__)

CALL_S = 15.0
"""Limit of the seconds of a call that is no stream: `drain` waits 10 s for etcd."""
STALL_S = 20.0
"""Seconds after which a stream whose reader takes nothing ends."""
SMALL = 4096
"""Bytes up to which a message is decoded in the admin thread."""
CALL_BYTES, PART_BYTES = 8192, 100
"""Bytes that are charged for a call, and for each part of its message (`count_parts`), beside three times the message:
the objects that are made of it."""
REPLY_BYTES = {"GetPrefixTree": (50, 4 << 20)}
"""By method whose reply may be longer than its message: bytes of the reply per byte of the message, and the limit."""
Unary = Callable[[Caller, Any], Awaitable[Message | bytes]]
"""A function that returns the reply, or its encoding."""
Stream = Callable[[Caller, Any], AsyncIterator[Message]]
Context = grpc.aio.ServicerContext[Any, Any]


class OutOfRange(Refused):
    """A cursor names a place that the log does not have."""


_CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (CredentialRefused, grpc.StatusCode.PERMISSION_DENIED),
    (LimitReached, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (MembershipRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (OutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Unreachable, grpc.StatusCode.UNAVAILABLE),
    (ConfigurationError, grpc.StatusCode.UNIMPLEMENTED),
    (Refused, grpc.StatusCode.INVALID_ARGUMENT),
    (ValueError, grpc.StatusCode.INVALID_ARGUMENT),
)
"""The status codes of the errors of a method; the first that fits counts."""


def _require_role(callers: Callers, context: Context, role: role_pb2.Role.ValueType, method: str) -> Caller:
    """The caller, if it has the role that a method needs. Raises `CredentialRefused`: a method without a role is open
    to none."""
    proven: Mapping[str, Any] = context.auth_context() or {}
    caller = callers.identify(context.peer(), proven, context.invocation_metadata() or ())
    if not role or caller.role < role:
        needed = role_pb2.Role.Name(role).removeprefix("ROLE_").lower()
        raise CredentialRefused(f"{method} needs the role {needed}, which '{caller.name}' does not have")
    return caller


async def abort_with(context: Context, error: Exception, method: str) -> None:
    """End the call with the status of the error."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    unnamed = "the daemon did not answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    text = str(error) or unnamed
    if code is grpc.StatusCode.INTERNAL:
        log.error("%s failed", method, exc_info=error, extra={"kind": "control"})
        text = "the daemon failed on this call; its log has the error"
    # gRPC keeps the error of `abort` with the call, and that error names this one as its context: a cycle, which would
    # keep the message until the next full garbage collection.
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__context__ = error.__cause__ = None
    await context.abort(code, text)


class Serving(NamedTuple):
    """The parts of the server that all methods use."""

    callers: Callers
    calls: Calls
    work: Work
    socket: Path | None = None
    """The control socket."""


class _Method:
    """One method: checks the role of a caller, reads the bytes of its message and decodes them."""

    def __init__(self, descriptor: MethodDescriptor, serving: Serving, role: role_pb2.Role.ValueType) -> None:
        self.name = descriptor.name
        self.socket = serving.socket
        self._serving = serving
        self._role = role
        self._kind: Any = descriptor.input_type
        self._request = GetMessageClass(descriptor.input_type)

    @contextlib.contextmanager
    def admitted(self, context: Context) -> Iterator[tuple[Caller, Call]]:
        """Count a call. Raises `CredentialRefused` and `LimitReached`."""
        caller = _require_role(self._serving.callers, context, self._role, self.name)
        with self._serving.calls.call(caller) as call:
            yield caller, call

    async def message(self, call: Call, context: Context) -> Any:
        """The message of a caller. Raises ValueError, `LimitReached` and TimeoutError."""
        body = await _read(call, context)
        if body is None:
            raise ValueError("the call has no message")
        work, of = self._serving.work, call.of
        small = len(body) <= SMALL
        parts = len(body) // 2 if small else await work.run(of, partial(count_parts, body, self._kind))
        factor, most = REPLY_BYTES.get(self.name, (0, 0))
        await call.begin(CALL_BYTES + 3 * len(body) + PART_BYTES * parts + min(factor * len(body), most))
        return self._decode(body) if small else await work.run(of, partial(self._decode, body))

    def _decode(self, body: bytes) -> Message:
        try:
            return self._request.FromString(body)
        except DecodeError:
            raise ValueError(f"the message is not a {self._request.DESCRIPTOR.full_name}") from None


def _handler(method: _Method, function: Unary | Stream, *, streams: bool) -> grpc.RpcMethodHandler[Any, Any]:
    answer: Any = function

    async def call(messages: AsyncIterator[bytes], context: Context) -> None:
        line = CallLog(method.name, method.socket)

        async def message(caller: Caller, own: Call) -> Any:
            found = await method.message(own, context)
            line.begins(caller, found)
            return found

        try:
            with method.admitted(context) as (caller, own):
                if streams:
                    async for each in answer(caller, await message(caller, own)):
                        await _write(context, each.SerializeToString())
                    line.ended(None)
                    return
                async with asyncio.timeout(CALL_S):
                    reply = await answer(caller, await message(caller, own))
                await _write(context, reply if isinstance(reply, bytes) else reply.SerializeToString())
                line.ended(reply)
        except Exception as error:
            line.failed(error)
            await abort_with(context, error, method.name)
        except asyncio.CancelledError as error:
            line.failed(error)
            raise

    return grpc.stream_stream_rpc_method_handler(call)


async def _read(call: Call, context: Context) -> bytes | None:
    """The next message of a caller; None after the last one."""
    # The iterator of gRPC would keep the message for as long as the call.
    body = await call.read(context.read)
    return body if isinstance(body, bytes) else None


async def _write(context: Context, message: bytes) -> None:
    try:
        async with asyncio.timeout(STALL_S):
            await context.write(message)
    except TimeoutError:
        raise TimeoutError(f"the reader of this call took nothing for {STALL_S:.0f} s") from None


def handlers_of(
    file: FileDescriptor,
    functions: Mapping[str, Unary] | Mapping[str, Stream],
    serving: Serving,
) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The handlers of all methods in a file of declarations, by path. `functions`: by name of the method."""
    made = {}
    for service in file.services_by_name.values():
        for method in service.methods:
            wrapped = _Method(method, serving, method.GetOptions().Extensions[role_pb2.role])
            path = f"/{file.package}.{service.name}/{method.name}"
            made[path] = _handler(wrapped, functions[method.name], streams=method.server_streaming)
    return made
