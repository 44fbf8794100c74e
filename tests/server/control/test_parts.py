"""The parts of a message are counted before it is decoded."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("grpc")

from hypothesis import given
from hypothesis import strategies as st

from tokenlake.errors import LimitReached
from tokenlake_proto.v1 import scheduling_pb2 as pb
from tokenlake_server.control.messages import MAX_KEYS
from tokenlake_server.control.parts import count_parts

PLANS: Any = pb.GenPlansRequest.DESCRIPTOR


def plans(sequences: int, instances: int) -> pb.GenPlansRequest:
    keys = bytes(32)
    return pb.GenPlansRequest(
        fleet=pb.Fleet(name="f", instances={f"i{number}": "n" for number in range(instances)}),
        tree=pb.PrefixTree(
            prompts=[pb.Prompt(name="p", tokens=1)],
            segment_tokens=16,
            sequences=[
                pb.Sequence(parent=number - 1, keys=keys, nodes=["a"], requests=[0], disk_s=1.0)
                for number in range(sequences)
            ],
        ),
    )


def test_fields_of_inner_messages_count() -> None:
    assert count_parts(b"", PLANS) == 0
    few, more = (count_parts(plans(number, 3).SerializeToString(), PLANS) for number in (10, 11))
    assert more - few == 6, "the sequence and its five fields"
    packed = pb.Sequence(requests=range(100)).SerializeToString()
    kind: Any = pb.Sequence.DESCRIPTOR
    assert count_parts(packed, kind) == 1 + 100 // 16


def test_the_largest_message_of_a_scheduler_is_within_the_limit() -> None:
    count_parts(plans(MAX_KEYS, 1024).SerializeToString(), PLANS)


def test_two_bytes_for_a_message_of_a_hundred() -> None:
    """2 MiB of empty sequences would take 100 MiB."""
    with pytest.raises(LimitReached, match="divide it into several calls"):
        count_parts(b"\x1a\x00" * (1 << 20), PLANS)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_number_or_an_error(body: bytes) -> None:
    """What protobuf takes without groups is counted; nothing else raises another error."""
    try:
        count_parts(body, PLANS)
    except ValueError:
        return
    except LimitReached:
        raise AssertionError("200 bytes are few parts") from None


@given(st.integers(0, 20), st.integers(0, 20))
def test_what_protobuf_writes_is_counted(sequences: int, instances: int) -> None:
    body = plans(sequences, instances).SerializeToString()
    assert count_parts(body, PLANS) >= sequences + instances
    for cut in range(1, min(len(body), 40)):
        try:
            pb.GenPlansRequest.FromString(body[:-cut])
        except Exception:
            with pytest.raises(ValueError, match="the message is not"):
                count_parts(body[:-cut], PLANS)
