"""Parts of `tokenlake bench router`: its requests, its figures, and what it says where an environment is missing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tokenlake.errors import ConfigurationError
from tokenlake_bench.router.command import ARRANGEMENTS, RouterArguments
from tokenlake_bench.router.engines import Counts, tokens_by_source
from tokenlake_bench.router.load import Served, first_text
from tokenlake_bench.router.results import added_of, row_of
from tokenlake_bench.router.sessions import Sessions
from tokenlake_testing.cluster import parse_metrics

SMALL = Sessions(sessions=5, turns=3, systems=2, system_tokens=10, question_tokens=4, answer_tokens=2)
ENGINE = """
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 30.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_cache_hit"} 50.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 20.0
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 100.0
"""
ROUTER = """
tokenlake_router_seconds_bucket{le="0.001",outcome="chosen"} 0.0
tokenlake_router_seconds_bucket{le="0.01",outcome="chosen"} 5.0
tokenlake_router_seconds_bucket{le="+Inf",outcome="chosen"} 6.0
tokenlake_router_seconds_count{outcome="chosen"} 6.0
tokenlake_router_seconds_sum{outcome="chosen"} 0.5
"""
BEFORE = """
tokenlake_router_seconds_bucket{le="0.001",outcome="chosen"} 0.0
tokenlake_router_seconds_bucket{le="0.01",outcome="chosen"} 1.0
tokenlake_router_seconds_bucket{le="+Inf",outcome="chosen"} 2.0
tokenlake_router_seconds_count{outcome="chosen"} 2.0
tokenlake_router_seconds_sum{outcome="chosen"} 0.48
"""


def words(sessions: Sessions, session: int, turn: int) -> list[str]:
    return [word for message in sessions.request(session, turn) for word in message["content"].split()]


def test_what_requests_share() -> None:
    """A request begins with the one before, and sessions share system prompts."""
    requests = [[words(SMALL, session, turn) for turn in range(3)] for session in range(5)]
    for turns in requests:
        for before, after in pairwise(turns):
            assert after[: len(before)] == before
            assert len(after) == len(before) + 2 + 4
    assert requests[0][0][:10] == requests[2][0][:10] != requests[1][0][:10]
    assert requests[0][0][10:] != requests[2][0][10:]
    assert requests == [[words(SMALL, session, turn) for turn in range(3)] for session in range(5)]
    flat = [tuple(request) for turns in requests for request in turns]
    assert SMALL.prompt_tokens == sum(map(len, flat))
    assert SMALL.distinct_tokens == len({request[:end] for request in flat for end in range(1, len(request) + 1)})
    assert max(map(len, flat)) < SMALL.longest


def test_the_row_counts_tokens_by_source() -> None:
    tokens = tokens_by_source(parse_metrics(ENGINE))
    assert tokens == {"own cache": 50, "pool": 20, "computed": 30}
    other = {"own cache": 0.0, "pool": 0.0, "computed": 90.0}
    counts = [Counts(tokens, 0.2, 1.0), Counts(other, 0.1, 3.0)]
    row = row_of("x", Served([0.1, 0.3, 0.2], ["OSError: down"], 2.0), counts, 0.2, None, 1.0)
    assert (row.requests, row.errors, row.prompt_tokens) == (4, 1, 190)
    assert (row.hit_share, row.own_cache_share, row.pool_share) == (70 / 190, 50 / 190, 20 / 190)
    assert (row.balance, row.computed_tokens) == (1.5, (30, 90))
    assert (row.engine_cpu_ms, row.router_cpu_ms) == pytest.approx((1000, 50))
    assert (row.ttft.p50_ms, row.ttft_mean_ms, row.engine_ttft_mean_ms) == pytest.approx((200, 200, 100))


def test_the_added_time_is_that_of_the_run() -> None:
    added = added_of(parse_metrics(BEFORE), parse_metrics(ROUTER))
    assert added.choices == {"chosen": 4}
    assert added.mean_ms == pytest.approx(5)
    assert added.p99_below_ms == 10
    assert added_of({}, parse_metrics(ROUTER)).p99_below_ms is None
    assert added_of({}, {}).choices == {}


def test_the_first_text_of_a_stream() -> None:
    lines = [
        b": comment\n",
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n',
        b'data: {"choices": []}\n',
        b'data: {"choices": [{"delta": {"content": "t1"}}]}\n',
        b"data: [DONE]\n",
    ]
    assert [first_text(line) for line in lines] == [False, False, False, True, False]


def test_arguments_are_checked() -> None:
    assert RouterArguments().chosen() == list(ARRANGEMENTS)
    wrongs: list[dict[str, Any]] = [{"arrangements": "plugin,nginx"}, {"instances": 1}, {"turns": 0}, {"memory_mib": 1}]
    for wrong in wrongs:
        with pytest.raises(ConfigurationError):
            RouterArguments(routers=Path("none"), **wrong)
