"""The contract of the control plane: generated from its declaration, and no change breaks an earlier client."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.protobuf")

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from tests.proto.generate import CONTRACT, PACKAGE, TOOLS, generate
from tokenlake_proto.v1 import admin_pb2, events_pb2, role_pb2, scheduling_pb2

NOW = [module.DESCRIPTOR for module in (admin_pb2, events_pb2, role_pb2, scheduling_pb2)]


def files_now() -> list[FileDescriptorProto]:
    files = []
    for descriptor in NOW:
        file = FileDescriptorProto()
        descriptor.CopyToProto(file)
        files.append(file)
    return files


def recorded() -> list[FileDescriptorProto]:
    return list(FileDescriptorSet.FromString(CONTRACT.read_bytes()).file)


def _messages(prefix: str, messages: list[DescriptorProto]) -> Iterator[tuple[str, DescriptorProto]]:
    for message in messages:
        yield f"{prefix}.{message.name}", message
        yield from _messages(f"{prefix}.{message.name}", list(message.nested_type))


def _enums(prefix: str, file: FileDescriptorProto) -> Iterator[tuple[str, EnumDescriptorProto]]:
    for enum in file.enum_type:
        yield f"{prefix}.{enum.name}", enum
    for name, message in _messages(prefix, list(file.message_type)):
        for enum in message.enum_type:
            yield f"{name}.{enum.name}", enum


def facts(files: list[FileDescriptorProto]) -> dict[str, str]:
    """What a client relies on: by name of a field, value or method, its number and type."""
    found = {}
    for file in files:
        for name, message in _messages(file.package, list(file.message_type)):
            for field in message.field:
                oneof = f" in {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else ""
                kind = FieldDescriptorProto.Type.Name(field.type)
                label = FieldDescriptorProto.Label.Name(field.label)
                found[f"{name}.{field.name}"] = f"{field.number} {label} {kind} {field.type_name}{oneof}"
        for name, enum in _enums(file.package, file):
            found |= {f"{name}.{value.name}": str(value.number) for value in enum.value}
        for service in file.service:
            for method in service.method:
                streams = f"{method.client_streaming} {method.server_streaming}"
                found[f"{file.package}.{service.name}.{method.name}"] = (
                    f"{method.input_type} {method.output_type} {streams}"
                )
    return found


def broken(before: list[FileDescriptorProto], after: list[FileDescriptorProto]) -> list[str]:
    """The names that a client of `before` does not find in `after`, or finds with another number or type."""
    now = facts(after)
    return [name for name, fact in facts(before).items() if now.get(name) != fact]


def test_the_contract_only_grows() -> None:
    """If no client can notice the change, and only then: `python -m tests.proto.generate --record`."""
    assert broken(recorded(), files_now()) == []


def test_the_record_is_that_of_the_declaration() -> None:
    """Additions are recorded too, so that the next change cannot break them."""
    assert facts(recorded()) == facts(files_now()), "python -m tests.proto.generate --record"


@pytest.mark.parametrize("change", ["removed", "renumbered", "retyped", "repeated", "value", "method"])
def test_a_breaking_change_is_seen(change: str) -> None:
    files = files_now()
    file = next(each for each in files if each.name.endswith("admin.proto"))
    message = next(each for each in file.message_type if each.name == "EvictResponse")
    if change == "removed":
        del message.field[0]
    elif change == "renumbered":
        message.field[0].number = 9
    elif change == "retyped":
        message.field[0].type = FieldDescriptorProto.TYPE_STRING
    elif change == "repeated":
        message.field[0].label = FieldDescriptorProto.LABEL_REPEATED
    elif change == "value":
        next(each for each in files if each.enum_type).enum_type[0].value[1].number = 7
    else:
        file.service[0].method[0].server_streaming = True
    assert len(broken(files_now(), files)) == 1


def test_an_addition_breaks_nothing() -> None:
    files = files_now()
    files[0].message_type[0].field.add(name="more", number=99, type=FieldDescriptorProto.TYPE_BOOL)
    assert broken(files_now(), files) == []


def python_with_tools() -> str | None:
    """An interpreter that has the tools: the one that `TOKENLAKE_TEST_PROTOC` names, or this one."""
    if named := os.environ.get("TOKENLAKE_TEST_PROTOC"):
        return named
    try:
        fits = importlib.metadata.version("grpcio-tools") == TOOLS
    except importlib.metadata.PackageNotFoundError:
        return None
    return sys.executable if fits and shutil.which("protoc-gen-mypy") else None


@pytest.mark.skipif(python_with_tools() is None, reason=f"grpcio-tools {TOOLS} and mypy-protobuf are not installed")
def test_the_generated_modules_follow_from_the_declarations(tmp_path: Path) -> None:
    made = generate(tmp_path, python_with_tools() or "")
    there = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*_pb2*.py*") if "__pycache__" not in path.parts}
    assert set(made) == there
    for path in made:
        assert (tmp_path / path).read_text() == (PACKAGE / path).read_text(), f"generate {path} again"
