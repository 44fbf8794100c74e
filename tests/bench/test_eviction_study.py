"""The study of eviction: the daemons' stores against the baselines, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tokenlake.memory.eviction import LeastRecentlyUsed
from tokenlake_bench.baselines import Accesses, Prompt, global_lru, infinite_cache, intern_segments
from tokenlake_bench.cli import bench
from tokenlake_bench.eviction.bounds import bounds_of
from tokenlake_bench.eviction.command import STUDIED, Cell, mean_share
from tokenlake_bench.eviction.stores import StudiedStore
from tokenlake_bench.workload import BuiltinWorkload

TOKENS = 64


def accesses(texts: list[tuple[int, ...]]) -> Accesses:
    """Segments of 10 tokens, prompts 3 longer, two seconds apart; all letters up to its end identify a segment."""
    ids: dict[tuple[int, ...], int] = {}
    chains = [tuple(ids.setdefault(text[: end + 1], len(ids)) for end in range(len(text))) for text in texts]
    return Accesses(10, [Prompt(10 * len(chain) + 3, chain, 2.0 * at) for at, chain in enumerate(chains)])


def conversations(requests: int = 120) -> Accesses:
    return intern_segments(BuiltinWorkload(requests), TOKENS)


def serve(stores: StudiedStore, asked: Accesses) -> int:
    """Number of hit segments."""
    hits = 0
    for prompt in asked.prompts:
        hits += stores.serve(prompt)
    stores.store.check_integrity()
    return hits


# -- stores


TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=40)


@given(TEXTS, st.integers(1, 12))
def test_lru_through_the_stores_is_the_lru_of_the_baselines(texts: list[tuple[int, ...]], capacity: int) -> None:
    asked = accesses(texts)
    stores = StudiedStore(asked, 10 * capacity, LeastRecentlyUsed)
    assert 10 * serve(stores, asked) == global_lru(asked, 10 * capacity).hit_tokens
    assert len(list(stores.store.segments())) <= capacity


@given(TEXTS, st.integers(1, 12), st.sampled_from(sorted(STUDIED)))
def test_no_policy_exceeds_the_clairvoyant_bound(texts: list[tuple[int, ...]], capacity: int, policy: str) -> None:
    asked = accesses(texts)
    hits = 10 * serve(StudiedStore(asked, 10 * capacity, STUDIED[policy]), asked)
    assert hits <= bounds_of(asked).clairvoyant(capacity).hit_tokens


def test_a_store_without_pressure_finds_all_there_is() -> None:
    asked = conversations()
    assert TOKENS * serve(StudiedStore(asked, 4_000_000, LeastRecentlyUsed), asked) == infinite_cache(asked).hit_tokens


def test_the_mean_of_shares_is_geometric() -> None:
    cells = [
        Cell(trace="t", capacity_tokens=1, policy="lru", hit_rate=0.1, of_clairvoyant=share) for share in (0.25, 1.0)
    ]
    assert mean_share(cells, "lru") == pytest.approx(0.5)
    assert mean_share(cells, "forecast") == 0.0


# -- command


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["eviction", *arguments])


def test_the_built_in_workload_end_to_end(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    done = invoke("--capacity-tokens", "8000,16000", "--limit", "60", "--json", str(written))
    assert done.exit_code == 0, done.output
    result = json.loads(written.read_bytes())
    assert result["complete"]
    assert [(each["capacity_tokens"], each["policy"]) for each in result["cells"]] == [
        (tokens, policy) for tokens in (8_000, 16_000) for policy in ("clairvoyant", "infinite", "forecast", "lru")
    ]
    asked = conversations(60)
    best, infinite, _, lru = (each["hit_rate"] for each in result["cells"][:4])
    assert lru == pytest.approx(global_lru(asked, 8_000).rate)
    assert infinite == pytest.approx(infinite_cache(asked).rate)
    assert result["cells"][3]["of_clairvoyant"] == pytest.approx(lru / best)


def test_prompts_longer_than_a_node_are_counted_apart(tmp_path: Path) -> None:
    written = tmp_path / "out.json"
    arguments = ("--capacity-tokens", "8000", "--nodes", "4", "--limit", "60", "--policy", "lru")
    done = invoke(*arguments, "--json", str(written))
    assert done.exit_code == 0, done.output
    assert "prompts are longer than a node's memory" in done.output
    asked = conversations(60)
    long = [prompt.tokens for prompt in asked.prompts if prompt.tokens > 2_000]
    for cell in json.loads(written.read_bytes())["cells"]:
        apart = cell["long_prompts"]
        assert (apart["prompts"], apart["token_share"]) == (len(long), sum(long) / asked.prompt_tokens)
        mean = apart["token_share"] * apart["hit_rate"] + (1 - apart["token_share"]) * apart["others_hit_rate"]
        assert mean == pytest.approx(cell["hit_rate"])


def test_default_capacities_depend_on_the_format(tmp_path: Path) -> None:
    mooncake, sessions = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    line = {"timestamp": 0, "input_length": 1_024, "output_length": 1, "hash_ids": [1, 2]}
    mooncake.write_text(json.dumps(line) + "\n" + json.dumps(line))
    request = {"t": 0, "in": 640, "out": 1, "hash_ids": "1-10"}
    sessions.write_text(json.dumps({"primary": True, "block_size": 64, "requests": [request, request]}))
    written = tmp_path / "out.json"
    done = invoke("--trace", str(mooncake), "--trace", str(sessions), "--policy", "lru", "--json", str(written))
    assert done.exit_code == 0, done.output
    cells = [each for each in json.loads(written.read_bytes())["cells"] if each["policy"] == "lru"]
    assert [(each["trace"], each["capacity_tokens"] / 1e6) for each in cells] == [
        *(("a.jsonl", size) for size in (1, 3, 10)),
        *(("b.jsonl", size) for size in (0.5, 1, 3)),
    ]
    assert [each["hit_rate"] for each in cells] == [0.5] * 3 + [0.4] * 3


def test_an_interrupted_study_keeps_finished_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = StudiedStore.serve
    calls = 0

    def interrupted(self: StudiedStore, prompt: Prompt) -> int:
        nonlocal calls
        calls += 1
        if calls == 100:
            raise KeyboardInterrupt
        return served(self, prompt)

    monkeypatch.setattr(StudiedStore, "serve", interrupted)
    written = tmp_path / "out.json"
    done = invoke("--policy", "lru", "--limit", "60", "--json", str(written))
    assert done.exit_code == 130
    assert "interrupted" in done.output
    result = json.loads(written.read_bytes())
    assert not result["complete"]
    assert [each["policy"] for each in result["cells"]] == ["clairvoyant", "infinite", "lru"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--policy", "lru,best"), "'policy' is 'best'; expected names among .*lru"),
        (("--capacity-tokens", "-5"), "'capacity_tokens'"),
        (("--capacity-tokens", "10"), "'capacity_tokens' is 10; expected at least 64"),
        (("--limit", "0"), "'limit'"),
        (("--nodes", "0"), "'nodes'"),
        (("--trace", "absent.jsonl"), "absent.jsonl: expected a readable file"),
    ],
)
def test_invalid_arguments_are_refused_by_name(arguments: tuple[str, ...], named: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert re.search(named, done.output)
