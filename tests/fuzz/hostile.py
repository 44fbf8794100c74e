"""Input from a hostile sender: messages of every type with fields at their bounds, and damaged bytes.

A `hostile` message decodes; a `broken` body mostly does not.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import msgspec
import msgspec.inspect as types
from hypothesis import strategies as st

from tokenlake.hints import MAX_LABEL, MAX_PIN_S, MAX_TTL_S, Hints
from tokenlake.keys import KEY_BYTES
from tokenlake.wire import Code, engine
from tokenlake.wire.slots import SlotRef

NODES = ("n0", "n1", "n2", "nobody", "")
TENANTS = ("red", "blue", "", "n0")
KEYS = [bytes([number]) * KEY_BYTES for number in range(12)]
FIRST_ID = (1 << 31) + 1
"""The first id that a node of incarnation 1 gives: ids from here on may name an existing lease, write or call."""
BOUNDS = sorted(
    {sign * ((1 << bits) + off) for bits in (0, 7, 8, 15, 16, 31, 32) for off in (-1, 0, 1) for sign in (1, -1)}
    | {-(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1}
)

_ids = st.one_of(st.integers(FIRST_ID, FIRST_ID + 60), st.sampled_from(BOUNDS))
_keys = st.one_of(
    st.lists(st.sampled_from(KEYS), max_size=8).map(b"".join),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True).map(b"".join),
    st.binary(max_size=70),
)
_codes = st.one_of(st.lists(st.sampled_from(list(Code)), max_size=8).map(bytes), st.binary(max_size=8))
_hints = st.builds(
    Hints,
    outlook=st.integers(0, 2),
    category=st.sampled_from(["", "chat", "x" * MAX_LABEL, "\N{SNOWMAN}"]),
    stop_reason=st.sampled_from(["", "stop", "x" * MAX_LABEL]),
    account=st.sampled_from(["", "", "a", "b"]),
    priority=st.integers(-1, 1),
    ttl_s=st.sampled_from([0.0, 1e-9, 0.01, MAX_TTL_S]),
    pin_s=st.sampled_from([0.0, 0.0, 1e-9, 0.01, MAX_PIN_S]),
)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "keys": _keys,
    "codes": _codes,
    "owners": _codes,
    "tenant": st.sampled_from(TENANTS),
    "node": st.sampled_from(NODES),
    "nodes": st.lists(st.sampled_from(NODES), max_size=8).map(tuple),
    "first_writers": st.lists(st.sampled_from(NODES), max_size=8).map(tuple),
    "lease": _ids,
    "write": _ids,
    "call": _ids,
    "leases": st.lists(_ids, max_size=4).map(tuple),
    "checksums": st.one_of(st.sampled_from([bytes(8 * n) for n in range(5)]), st.binary(max_size=70)),
    "slots": st.one_of(st.sampled_from([bytes(16 * n) for n in range(5)]), st.binary(max_size=70)),
}
"""By field name: values that are valid for a node, or nearly so."""
_slots = st.one_of(
    st.lists(st.builds(SlotRef, st.integers(0, 1), st.integers(0, 3), st.integers(0, 2)), max_size=4).map(
        lambda places: b"".join(place.pack() for place in places)
    ),
    st.binary(max_size=70),
)
_few = st.sampled_from([0, 1, 4, 1024, (1 << 32) - 1])
_REGRANT: dict[str, st.SearchStrategy[Any]] = {
    "leases": st.lists(st.tuples(_ids, _few, _few, _slots), max_size=4).map(tuple),
    "writes": st.lists(st.tuples(_ids, _slots), max_size=4).map(tuple),
}


def _within(of: types.Type) -> st.SearchStrategy[Any]:
    """Values of the declared type, mostly the extreme ones."""
    match of:
        case types.BoolType():
            return st.booleans()
        case types.IntType(ge=least, lt=below, le=most):
            highest = below - 1 if below is not None else most
            low = -(1 << 63) if least is None else least
            high = (1 << 64) - 1 if highest is None else highest
            fitting = [bound for bound in (low, high, *BOUNDS) if low <= bound <= high]
            return st.one_of(st.integers(max(low, 0), min(high, 9)), st.sampled_from(fitting))
        case types.FloatType(ge=least, gt=above, le=most):
            low_f, high_f = -1e308 if least is None else float(least), 1e308 if most is None else float(most)
            low_f = low_f if above is None else max(low_f, above + 1e-300)
            return st.sampled_from([bound for bound in (low_f, high_f, 0.0, 1e-9, 0.01) if low_f <= bound <= high_f])
        case types.StrType(max_length=longest):
            return st.sampled_from(["", "n1", "\0", "x" * (longest or 300), "\N{SNOWMAN}"])
        case types.BytesType(min_length=shortest, max_length=longest):
            return st.binary(min_size=shortest or 0, max_size=70 if longest is None else longest)
        case types.NoneType():
            return st.none()
        case types.LiteralType(values=some):
            return st.sampled_from(list(some))
        case types.UnionType(types=some):
            return st.one_of(*map(_within, some))
        case types.TupleType(item_types=items):
            return st.tuples(*map(_within, items))
        case types.NamedTupleType(cls=named, fields=parts):
            return st.builds(named, *(_within(part.type) for part in parts))
        case types.VarTupleType(item_type=item):
            return st.lists(_within(item), max_size=8).map(tuple)
        case types.StructType(cls=cls) if cls is Hints:
            return _hints
        case types.StructType(cls=cls):
            return hostile(cls)
    raise NotImplementedError(f"a message holds {of}; teach this test to make one")


def _are_indices(field: types.Field) -> bool:
    """Are the nodes of this field given by index, and not by name as elsewhere?"""
    of = field.type
    return field.name == "nodes" and isinstance(of, types.VarTupleType) and isinstance(of.item_type, types.IntType)


@functools.cache
def hostile(message: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Messages of this type that its decoder takes."""
    described = types.type_info(message)
    assert isinstance(described, types.StructType)
    known = types.BytesType | types.StrType | types.IntType | types.VarTupleType
    fields = {
        field.name: _FIELDS[field.name]
        if field.name in _FIELDS and isinstance(field.type, known) and not _are_indices(field)
        else _within(field.type)
        for field in described.fields
    }
    if message is engine.Regrant:
        fields |= _REGRANT
    if "ranges" in fields:
        fields["ranges"] = st.lists(
            st.tuples(_ids, st.sampled_from([0, 1, 3, (1 << 32) - 1]), st.sampled_from([0, 2, 8, (1 << 32) - 1])),
            max_size=4,
        ).map(tuple)
    return st.builds(message, **fields)


_junk = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(BOUNDS),
    st.floats(),
    st.binary(max_size=40),
    st.text(max_size=10),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.integers(0, 3), st.integers(0, 3), max_size=3),
)


@functools.cache
def broken(messages: tuple[type[msgspec.Struct], ...]) -> st.SearchStrategy[bytes]:
    """Bodies that are nearly messages: fields of another type, too few, too many; damaged bytes; noise."""

    @st.composite
    def body(draw: st.DrawFn) -> bytes:
        message = draw(st.sampled_from(messages).flatmap(hostile))
        items = msgspec.to_builtins(message, builtin_types=(bytes,))
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(0, len(items)))
            how = draw(st.sampled_from(["replace", "insert", "drop"]))
            items[at : at + (how != "insert")] = [] if how == "drop" else [draw(_junk)]
        return msgspec.msgpack.encode(items)

    return st.one_of(body(), body().flatmap(damaged), st.binary(max_size=80))


def damaged(body: bytes) -> st.SearchStrategy[bytes]:
    """A few bytes changed, lost, doubled, or replaced by the header of a long value."""
    lengths = [b"\xc6\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\xdf\x80\x00\x00\x00", b"\xdb\xff\xff\xff\xff"]
    change = st.tuples(
        st.integers(0, max(0, len(body) - 1)),
        st.one_of(st.binary(max_size=2), st.sampled_from(lengths)),
        st.integers(0, 3),
    )

    def apply(changes: list[tuple[int, bytes, int]]) -> bytes:
        result = bytearray(body)
        for at, new, lost in changes:
            result[at : at + lost] = new
        return bytes(result)

    return st.lists(change, min_size=1, max_size=4).map(apply)


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    """A stream cut in pieces."""
    bounds = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:stop] for start, stop in itertools.pairwise(bounds)]
