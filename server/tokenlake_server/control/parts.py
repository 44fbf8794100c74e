"""The number of parts of an encoded message, which tells how much memory its decoding takes.

An empty message within a message takes 2 bytes on the wire and 100 in memory.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from tokenlake.errors import LimitReached

MAX_PARTS = 1 << 17
"""Limit of the messages, names and numbers in one message of a caller."""
MAX_DEPTH = 16
"""Limit of messages within each other; those of callers have 4."""
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


def count_parts(body: bytes, kind: Descriptor) -> int:
    """The number of fields in an encoded message of this kind and in the messages within it; a packed list of numbers
    counts each 16 of its bytes. Raises `LimitReached` for more than `MAX_PARTS`, and ValueError for bytes that are no
    message."""
    count, at, end = 0, 0, len(body)
    known = {kind: _fields(kind)}
    fields = known[kind]
    outer: list[tuple[int, dict[int, Descriptor | None]]] = []
    """The ends of the messages around the current one, and their fields."""
    wrong = ValueError(f"the message is not a {kind.full_name}")
    try:
        while True:
            while at == end:
                if not outer:
                    return count
                end, fields = outer.pop()
            count += 1
            if count > MAX_PARTS or len(outer) > MAX_DEPTH:
                raise LimitReached(
                    f"a message of more than {MAX_PARTS} fields, names and numbers: divide it into several calls"
                )
            tag, at = _varint(body, at)
            wire = tag & 7
            if wire == _BYTES:
                length, at = _varint(body, at)
                inner = fields.get(tag >> 3)
                if at + length > end:
                    raise wrong
                if inner is not None:
                    if inner not in known:
                        known[inner] = _fields(inner)
                    outer.append((end, fields))
                    end, fields = at + length, known[inner]
                    continue
                if tag >> 3 in fields:
                    count += length >> 4
                at += length
            elif wire == _VARINT:
                _, at = _varint(body, at)
            elif wire in (_EIGHT, _FOUR):
                at += 8 if wire == _EIGHT else 4
            else:
                raise wrong
            if at > end:
                raise wrong
    except IndexError:
        raise wrong from None


def _fields(kind: Descriptor) -> dict[int, Descriptor | None]:
    """By number of a field: the kind of its messages; None for a list of numbers. Other fields are absent."""
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return {
        each.number: each.message_type
        for each in kind.fields
        if each.message_type is not None or (each.is_repeated and each.type not in texts)
    }


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it. Raises IndexError behind the end, ValueError for more than ten
    bytes."""
    value = body[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in range(7, 70, 7):
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("the message has a number of more than ten bytes")
