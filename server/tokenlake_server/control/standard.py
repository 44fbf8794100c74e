"""gRPC's standard services: health and reflection.

Their messages are declared under a package of our own, so that a process may load grpcio's packages of the standard
services as well; on the wire and in reflection they have the standard names. (grpcio-health-checking and
grpcio-reflection pin versions of protobuf that an engine's environment does not have.)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.message import DecodeError

from tokenlake.errors import LimitReached
from tokenlake_proto.standard import health_pb2, reflection_pb2
from tokenlake_server.control.bridge import Bridge
from tokenlake_server.control.callers import Caller
from tokenlake_server.control.service import Stream, Unary

HEALTH = "grpc.health.v1"
REFLECTION = ("grpc.reflection.v1", "grpc.reflection.v1alpha")
WATCH_S = 1.0
MAX_WATCHES = 32
"""Limit of the watches of the health, and of the questions of one reflection stream that are answered at a time."""
_STATUS = health_pb2.HealthCheckResponse


class Health:
    """The service `Health`. `""` and `tokenlake.v1.Admin` are reported as serving while the daemon runs and its control
    loop answers; the others once the node is a member of its cluster."""

    def __init__(self, bridge: Bridge, member: Callable[[], bool], services: Sequence[str]) -> None:
        """`member` is called on the control loop. `services`: the names of all services."""
        self._bridge = bridge
        self._member = member
        self._services = {"": False} | {name: name.rpartition(".")[2] != "Admin" for name in services}
        self._watches = 0
        self.functions: dict[str, Unary | Stream] = {"Check": self.check, "Watch": self.watch}

    async def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        if service not in self._services:
            return _STATUS.SERVICE_UNKNOWN
        try:
            async with asyncio.timeout(WATCH_S):
                member = await self._bridge.call(self._member)
        except TimeoutError:
            return _STATUS.NOT_SERVING
        return _STATUS.SERVING if member or not self._services[service] else _STATUS.NOT_SERVING

    async def check(self, caller: Caller, message: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """The status of a service."""
        return _STATUS(status=await self._status(message.service))

    async def watch(
        self, caller: Caller, message: health_pb2.HealthCheckRequest
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status of a service, and each change of it."""
        if self._watches >= MAX_WATCHES:
            raise LimitReached(f"{MAX_WATCHES} watches of the health are under way")
        self._watches += 1
        last = None
        try:
            while True:
                status = await self._status(message.service)
                if status != last:
                    last = status
                    yield _STATUS(status=status)
                await asyncio.sleep(WATCH_S)
        finally:
            self._watches -= 1


class Reflection:
    """Describes the services, for tools such as grpcurl."""

    def __init__(self, files: Sequence[FileDescriptor]) -> None:
        """`files`: those that declare the services."""
        self._files: dict[str, FileDescriptorProto] = {}
        """By name, each file and those that it imports."""
        self._symbols: dict[str, str] = {}
        self._services: list[str] = []
        for file in files:
            self._add(file)
        self._standard(health_pb2.DESCRIPTOR, HEALTH, "grpc/health/v1/health.proto")
        for package in REFLECTION:
            self._standard(reflection_pb2.DESCRIPTOR, package, f"{package.replace('.', '/')}/reflection.proto")

    def _add(self, file: FileDescriptor) -> None:
        if file.name in self._files:
            return
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        self._index(proto)
        for imported in file.dependencies:
            self._add(imported)

    def _standard(self, file: FileDescriptor, package: str, name: str) -> None:
        """Describe a standard service under its standard names."""
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        own = f".{file.package}."
        for service in proto.service:
            for method in service.method:
                method.input_type = method.input_type.replace(own, f".{package}.")
                method.output_type = method.output_type.replace(own, f".{package}.")
        for message in proto.message_type:
            for field in message.field:
                if field.type_name:
                    field.type_name = field.type_name.replace(own, f".{package}.")
        proto.name, proto.package = name, package
        self._index(proto)

    def _index(self, proto: FileDescriptorProto) -> None:
        self._files[proto.name] = proto
        for service in proto.service:
            name = f"{proto.package}.{service.name}"
            self._services.append(name)
            self._symbols |= dict.fromkeys([name, *(f"{name}.{method.name}" for method in service.method)], proto.name)
        for message in proto.message_type:
            self._index_message(f"{proto.package}.{message.name}", message, proto.name)
        for name in [each.name for each in proto.enum_type] + [each.name for each in proto.extension]:
            self._symbols[f"{proto.package}.{name}"] = proto.name

    def _index_message(self, name: str, message: Any, file: str) -> None:
        self._symbols[name] = file
        for nested in message.nested_type:
            self._index_message(f"{name}.{nested.name}", nested, file)
        for enum in message.enum_type:
            self._symbols[f"{name}.{enum.name}"] = file

    def answer(self, message: reflection_pb2.ServerReflectionRequest) -> reflection_pb2.ServerReflectionResponse:
        """Answer one question."""
        reply = reflection_pb2.ServerReflectionResponse(valid_host=message.host, original_request=message)
        match message.WhichOneof("message_request"):
            case "list_services":
                named = [reflection_pb2.ServiceResponse(name=name) for name in sorted(self._services)]
                reply.list_services_response.CopyFrom(reflection_pb2.ListServiceResponse(service=named))
            case "file_by_filename":
                self._describe(reply, message.file_by_filename)
            case "file_containing_symbol":
                self._describe(reply, self._symbols.get(message.file_containing_symbol, ""))
            case "file_containing_extension":
                found = message.file_containing_extension
                extends = [
                    proto.name
                    for proto in self._files.values()
                    for each in proto.extension
                    if (each.extendee.lstrip("."), each.number) == (found.containing_type, found.extension_number)
                ]
                self._describe(reply, extends[0] if extends else "")
            case "all_extension_numbers_of_type":
                wanted = message.all_extension_numbers_of_type
                numbers = [
                    each.number
                    for proto in self._files.values()
                    for each in proto.extension
                    if each.extendee.lstrip(".") == wanted
                ]
                reply.all_extension_numbers_response.base_type_name = wanted
                reply.all_extension_numbers_response.extension_number.extend(numbers)
            case _:
                reply.error_response.error_code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
                reply.error_response.error_message = "a question without content"
        return reply

    def _describe(self, reply: reflection_pb2.ServerReflectionResponse, name: str) -> None:
        """Put the file of this name, and those that it imports, into the reply."""
        wanted, found = [name], dict[str, FileDescriptorProto]()
        while wanted:
            each = wanted.pop()
            proto = self._files.get(each)
            if proto is not None and each not in found:
                found[each] = proto
                wanted += proto.dependency
        if not found:
            reply.error_response.error_code = grpc.StatusCode.NOT_FOUND.value[0]
            reply.error_response.error_message = "this daemon has no such file or symbol"
        files = [proto.SerializeToString() for proto in found.values()]
        if files:
            reply.file_descriptor_response.file_descriptor_proto.extend(files)


def read_question(body: bytes) -> reflection_pb2.ServerReflectionRequest:
    """The question in a message of a reflection stream. Raises ValueError."""
    try:
        return reflection_pb2.ServerReflectionRequest.FromString(body)
    except DecodeError:
        raise ValueError("the message is not a ServerReflectionRequest") from None
