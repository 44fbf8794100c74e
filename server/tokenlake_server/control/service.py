"""Wraps the functions of the services for gRPC: checks the role, decodes the message, limits the time, and turns errors
into status codes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

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
from tokenlake_server.control.callers import Caller, Callers

__all__ = ["CALL_S", "STALL_S", "Context", "OutOfRange", "Stream", "Unary", "abort_with", "handlers_of", "require_role"]

log = logging.getLogger(__name__)

CALL_S = 15.0
"""Limit of the seconds of a call that is no stream: `drain` waits 10 s for etcd."""
STALL_S = 20.0
"""Seconds after which a stream whose reader takes nothing ends."""
Unary = Callable[[Caller, Any], Awaitable[Message]]
Stream = Callable[[Caller, Any], AsyncIterator[Message]]
Context = grpc.aio.ServicerContext[Any, Any]


class OutOfRange(Refused):
    """A cursor names a place that the log does not have."""


def _code(error: Exception) -> grpc.StatusCode:
    """The status code of an error of a method."""
    match error:
        case CredentialRefused():
            return grpc.StatusCode.PERMISSION_DENIED
        case LimitReached():
            return grpc.StatusCode.RESOURCE_EXHAUSTED
        case MembershipRefused():
            return grpc.StatusCode.FAILED_PRECONDITION
        case OutOfRange():
            return grpc.StatusCode.OUT_OF_RANGE
        case TimeoutError():
            return grpc.StatusCode.DEADLINE_EXCEEDED
        case Unreachable():
            return grpc.StatusCode.UNAVAILABLE
        case ConfigurationError():
            return grpc.StatusCode.UNIMPLEMENTED
        case Refused() | ValueError():
            return grpc.StatusCode.INVALID_ARGUMENT
        case _:
            return grpc.StatusCode.INTERNAL


def require_role(callers: Callers, context: Context, role: role_pb2.Role.ValueType, method: str) -> Caller:
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
    code = _code(error)
    unnamed = "the daemon did not answer in time" if isinstance(error, TimeoutError) else type(error).__name__
    text = str(error) or unnamed
    if code is grpc.StatusCode.INTERNAL:
        log.error("%s failed", method, exc_info=error, extra={"kind": "control"})
        text = "the daemon failed on this call; its log has the error"
    await context.abort(code, text)


class _Method:
    """One method: checks the role of a caller, and decodes the bytes of the message that gRPC passes."""

    def __init__(self, descriptor: MethodDescriptor, callers: Callers, role: role_pb2.Role.ValueType) -> None:
        self.name = descriptor.name
        self._callers = callers
        self._role = role
        self._request = GetMessageClass(descriptor.input_type)

    def admit(self, context: Context, body: bytes) -> tuple[Caller, Any]:
        """The caller and the message. Raises `CredentialRefused` and ValueError."""
        caller = require_role(self._callers, context, self._role, self.name)
        try:
            return caller, self._request.FromString(body)
        except DecodeError:
            raise ValueError(f"the message is not a {self._request.DESCRIPTOR.full_name}") from None


def _unary(method: _Method, function: Unary) -> grpc.RpcMethodHandler[Any, Any]:
    async def call(body: bytes, context: Context) -> bytes:
        try:
            caller, message = method.admit(context, body)
            async with asyncio.timeout(CALL_S):
                return (await function(caller, message)).SerializeToString()
        except Exception as error:
            await abort_with(context, error, method.name)
            raise AssertionError("unreachable: abort raises") from error

    return grpc.unary_unary_rpc_method_handler(call)


def _stream(method: _Method, function: Stream) -> grpc.RpcMethodHandler[Any, Any]:
    async def call(body: bytes, context: Context) -> None:
        try:
            caller, message = method.admit(context, body)
            async for each in function(caller, message):
                try:
                    async with asyncio.timeout(STALL_S):
                        await context.write(each.SerializeToString())
                except TimeoutError:
                    raise TimeoutError(f"the reader of this stream took nothing for {STALL_S:.0f} s") from None
        except Exception as error:
            await abort_with(context, error, method.name)

    return grpc.unary_stream_rpc_method_handler(call)


def handlers_of(
    file: FileDescriptor,
    functions: Mapping[str, Unary] | Mapping[str, Stream] | Mapping[str, Unary | Stream],
    callers: Callers,
    *,
    role: role_pb2.Role.ValueType | None = None,
    package: str = "",
) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """The handlers of all methods in a file of declarations, by path. `functions`: by name of the method. `role`: that
    of methods whose declaration has none. `package`: the name under which clients know the package."""
    made = {}
    for service in file.services_by_name.values():
        for method in service.methods:
            declared = method.GetOptions().Extensions[role_pb2.role] or role or role_pb2.ROLE_UNSPECIFIED
            wrapped = _Method(method, callers, declared)
            function: Any = functions[method.name]
            path = f"/{package or file.package}.{service.name}/{method.name}"
            make: Any = _stream if method.server_streaming else _unary
            made[path] = make(wrapped, function)
    return made
