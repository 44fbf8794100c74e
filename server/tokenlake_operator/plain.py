"""Messages of the control plane as JSON: fields by their names in `proto/tokenlake/v1`, numbers as numbers, bytes in
hexadecimal. Every field is there, also one with its default."""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """The fields of a message. Fields of a choice (oneof) that was not made are left out."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.containing_oneof is not None and not message.HasField(field.name):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            fields[field.name] = {str(key): _value(inner, value[key]) for key in sorted(value)}
        elif isinstance(value, MutableSequence):
            fields[field.name] = [_value(field, each) for each in value]
        elif field.message_type is not None and not message.HasField(field.name):
            fields[field.name] = None
        else:
            fields[field.name] = _value(field, value)
    return fields


def _value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value
