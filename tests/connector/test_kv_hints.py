"""Actions of routers: what a request carries, and what becomes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.connector.side import SEGMENT, Bench, request
from tokenlake.hints import MAX_PIN_S, Hints, Outlook
from tokenlake_client.engines.common import kv_hints
from tokenlake_client.engines.common.kv_hints import Bring, acts_of, envelope_of
from tokenlake_client.engines.vllm.counters import COUNTS
from tokenlake_client.engines.vllm.known.request import RequestEnd


class Action(msgspec.Struct, frozen=True):
    """vLLM's `KvHintAction`."""

    action_id: str
    action_type: str
    action_version: str
    payload: Any


class Envelope(msgspec.Struct, frozen=True):
    """vLLM's `KvHintsEnvelope`."""

    protocol_version: str
    message_id: str
    actions: Any


def envelope(*actions: tuple[str, Any], version: str = "1.0") -> Envelope:
    made = [Action(str(at), kind, version, payload) for at, (kind, payload) in enumerate(actions)]
    return Envelope("1.0", "m", made)


def test_acts_become_hints() -> None:
    """Those that the request carries otherwise stay where a router says nothing."""
    own = Hints(category="agent", ttl_s=30.0)
    acts = acts_of(envelope(("retain", {"priority": 1}), ("kv.pin", {"ttl_s": 60})), own)
    assert acts.hints == Hints(Outlook.GOES_ON, "agent", priority=1, ttl_s=30.0, pin_s=60.0)
    assert acts.counted == (("retain", "obeyed"), ("pin", "obeyed"))
    assert acts_of(envelope(("demote", {})), None).hints == Hints(Outlook.OVER, priority=-1)
    assert acts_of(envelope(("PIN", {})), None).hints == Hints(pin_s=kv_hints.PIN_S)
    assert acts_of(None, own) == kv_hints.Acts(own)
    assert acts_of(envelope(), None).hints is None


def test_prompts_to_bring() -> None:
    said = envelope(
        ("prefetch", {}),
        ("prefetch", {"token_ids": [1, 2]}),
        ("share", {"node": "n1"}),
        ("kv.fetch", {"source_control_endpoint": "tcp://h:1", "block_hashes": [1]}),
    )
    expected = (Bring("prefetch", None, ""), Bring("prefetch", [1, 2], ""), Bring("share", None, "n1"))
    assert acts_of(said, None).brings == (*expected, Bring("share", None, ""))


@pytest.mark.parametrize(
    ("action", "version", "counted"),
    [
        (("park", {}), "1.0", ("", "unknown")),
        (("retain", {}), "2.0", ("retain", "refused")),
        (("retain", {}), "", ("retain", "refused")),
        (("retain", {"priority": 2}), "1", ("retain", "malformed")),
        (("retain", {"prio": 1}), "1", ("retain", "malformed")),
        (("pin", {"ttl_s": 0}), "1", ("pin", "malformed")),
        (("pin", {"ttl_s": MAX_PIN_S + 1}), "1", ("pin", "malformed")),
        (("pin", {"ttl_s": float("nan")}), "1", ("pin", "malformed")),
        (("prefetch", {"token_ids": [-1]}), "1", ("prefetch", "malformed")),
        (("share", {"node": "n" * 99}), "1", ("share", "malformed")),
        (("share", {"token_ids": [0] * (kv_hints.MAX_PROMPT + 1)}), "1", ("share", "malformed")),
        (("pin", None), "1", ("", "malformed")),
        (("pin", {}), "1" + ".1" * 99, ("", "malformed")),
        (("p" * 99, {}), "1", ("", "malformed")),
        ((3, {}), "1", ("", "malformed")),
    ],
)
def test_an_action_that_is_not_obeyed(action: Any, version: str, counted: tuple[str, str]) -> None:
    """The others are."""
    good = Action("g", "demote", "1", {})
    said = Envelope("1", "m", [Action("a", action[0], version, action[1]), good])
    acts = acts_of(said, None)
    assert acts.counted == (counted, ("demote", "obeyed"))
    assert acts.hints == Hints(Outlook.OVER, priority=-1)
    assert len(acts.problems) == 1
    assert not acts.brings


def test_too_many_actions() -> None:
    acts = acts_of(envelope(*[("demote", {})] * (kv_hints.MAX_ACTIONS + 3)), None)
    assert acts.counted.count(("demote", "obeyed")) == kv_hints.MAX_ACTIONS
    assert acts.counted.count(("", "refused")) == 3


def test_the_tokens_of_a_request_are_limited() -> None:
    """Also where several actions name them."""
    half = [0] * (kv_hints.MAX_PROMPT // 2 + 1)
    acts = acts_of(envelope(("prefetch", {"token_ids": half}), ("share", {"token_ids": half})), None)
    assert [each.act for each in acts.brings] == ["prefetch"]
    assert acts.counted == (("share", "refused"),)


def test_an_envelope_is_not_read_beyond_its_limits() -> None:
    """A scheduler reads it between two steps."""
    nested: Any = {}
    for _ in range(10_000):
        nested = {"x": nested}
    read = 0

    class Payload(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            nonlocal read
            read += 1
            return super().__getitem__(key)

    many = [{"action_type": "pin", "action_version": "1", "payload": nested}] * 10_000
    acts = acts_of({"actions": many, "more": Payload(x=many)}, None)
    assert acts.counted.count(("pin", "malformed")) == kv_hints.MAX_ACTIONS
    assert acts.counted.count(("", "refused")) == 10_000 - kv_hints.MAX_ACTIONS
    assert read == 0


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["actions", "action_type", "action_version", "payload", "token_ids", "ttl_s", "x"]),
                inner | st.sampled_from(["retain", "pin", "prefetch", "1.0"]),
                max_size=5,
            )
        ),
        max_leaves=20,
    )
)
def test_any_value_raises_nothing(value: Any) -> None:
    own = Hints(category="c")
    pin = {"action_type": "pin", "action_version": "1", "payload": value}
    for said in (value, {"actions": [value]}, {"actions": [pin]}):
        acts = acts_of(said, own)
        for act, outcome in acts.counted:
            assert f"hints_{act or 'other'}_{outcome}" in COUNTS
        assert not any(outcome == "obeyed" for _, outcome in acts.counted) or acts.hints is not None


def test_where_an_envelope_is() -> None:
    one = envelope(("demote", {}))
    assert envelope_of(SimpleNamespace(kv_hints=one, kv_transfer_params={"kv_hint": 3})) is one
    assert envelope_of(SimpleNamespace(kv_hints=None, kv_transfer_params={"kv_hint": 3})) == 3
    assert envelope_of(SimpleNamespace(kv_transfer_params={"kv_hints": 4})) == 4
    assert envelope_of(SimpleNamespace(kv_hints=None, kv_transfer_params=None)) is None


def test_a_prompt_is_brought() -> None:
    bench, asked = Bench(), request(33)
    bench.side.new_request(asked)
    other = list(range(500, 500 + 2 * SEGMENT + 3))
    assert bench.side.bring("r", Bring("prefetch", None, ""))
    assert bench.side.bring("r", Bring("share", other, "n1"))
    own = tuple(bench.pool.prefix(asked.all_token_ids).keys)
    assert bench.pool.prefetched == [(own, ""), (tuple(bench.pool.prefix(other).keys), "n1")]
    assert not bench.side.bring("unknown", Bring("prefetch", None, ""))
    bench.pool.reachable = False
    assert not bench.side.bring("r", Bring("prefetch", None, ""))
    bench.pool.connected = False
    assert not bench.side.bring("r", Bring("prefetch", None, ""))
    bench.there = False
    assert not bench.side.bring("r", Bring("prefetch", None, ""))


def test_a_pin_goes_with_the_request() -> None:
    """With its lookup, its saves, and the hints at its end."""
    bench, asked = Bench(), request(33)
    pinned = acts_of(envelope(("pin", {"ttl_s": 60})), None).hints
    bench.place(asked, hints=pinned)
    saves = bench.step(asked, 0, 33).saves
    bench.end(asked, RequestEnd(complete=True, stop_reason="stop", output_tokens=5))
    assert bench.pool.matches[0].options.hints == pinned == saves[0].hints
    assert bench.pool.hinted[0][1].pin_s == 60.0
