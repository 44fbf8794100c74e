"""The study of eviction: the daemons' stores against the baselines, hints, several nodes, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tokenlake.hints import NO_ACCESS, NO_HINTS, Hints, Outlook
from tokenlake.memory.eviction import LeastRecentlyUsed
from tokenlake_bench.baselines import Accesses, Prompt, global_lru, infinite_cache, intern_segments
from tokenlake_bench.cli import bench
from tokenlake_bench.eviction.bounds import bounds_of
from tokenlake_bench.eviction.command import STUDIED, Ceiling, Cell, compared, hints
from tokenlake_bench.eviction.stores import StudiedStore
from tokenlake_bench.workload import BuiltinSettings, builtin_workload

TOKENS = 64


def accesses(texts: list[tuple[int, ...]]) -> Accesses:
    """Segments of 10 tokens, prompts 3 longer, two seconds apart; all letters up to its end identify a segment."""
    ids: dict[tuple[int, ...], int] = {}
    chains = [tuple(ids.setdefault(text[: end + 1], len(ids)) for end in range(len(text))) for text in texts]
    return Accesses(10, [Prompt(10 * len(chain) + 3, chain, 2.0 * at) for at, chain in enumerate(chains)])


def conversations(requests: int = 120) -> Accesses:
    return intern_segments(builtin_workload(BuiltinSettings(requests=requests)), TOKENS)


def serve(stores: StudiedStore, asked: Accesses) -> int:
    """Number of hit segments."""
    hits = 0
    for prompt in asked.prompts:
        hits += stores.serve(prompt, NO_HINTS)
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


def test_no_policy_takes_a_parent_before_its_children() -> None:
    asked = accesses([(0, 1, 2), (3,)])
    stores = StudiedStore(asked, 30, _ParentsFirst)
    serve(stores, asked)
    assert len(list(stores.store.segments())) == 3


class _ParentsFirst(LeastRecentlyUsed):
    """Evicts the segment of least depth."""

    def victim(self, now: float) -> Any:
        return min(self, key=lambda segment: segment.depth)


# -- hints


def test_hints_have_the_given_accuracy_and_depend_on_the_seed() -> None:
    prompts = [Prompt(1, (), conversation=number % 700) for number in range(2_000)]
    truth = [Hints(Outlook.GOES_ON if number + 700 < 2_000 else Outlook.OVER) for number in range(2_000)]
    assert hints(prompts, 1.0, 0) == truth
    said = hints(prompts, 0.9, 3)
    assert sum(a == b for a, b in zip(said, truth, strict=True)) / 2_000 == pytest.approx(0.9, abs=0.02)
    assert said == hints(prompts, 0.9, 3) != hints(prompts, 0.9, 4)
    assert not any(a == b for a, b in zip(hints(prompts, 0.0, 0), truth, strict=True))
    assert hints(prompts, None, 0) == [NO_HINTS] * 2_000


def test_hints_reach_the_policy() -> None:
    asked = accesses([(0, 1), (0, 1), (2,)])
    words: list[Hints] = []

    class _Listens(LeastRecentlyUsed):
        def insert(self, segment: Any, now: float) -> None:
            words.append(segment.hints)
            super().insert(segment, now)

        def touch(self, segment: Any, now: float) -> None:
            words.append(segment.hints)
            super().touch(segment, now)

    stores = StudiedStore(asked, 100, _Listens)
    said = [Hints(Outlook.GOES_ON), Hints(Outlook.OVER), Hints(category="x")]
    for prompt, word in zip(asked.prompts, said, strict=True):
        stores.serve(prompt, word)
    assert [replace(word, access=NO_ACCESS) for word in words] == [said[0]] * 2 + [said[1]] * 2 + [said[2]]
    assert [(word.access.segments, word.access.hits) for word in words] == [(2, 0)] * 2 + [(2, 2)] * 2 + [(1, 0)]


# -- figures


def cell(policy: str, rate: float, *, tokens: int = 100) -> Cell:
    return Cell(trace="t", capacity_tokens=tokens, policy=policy, hit_rate=rate)


def test_figures_that_follow_from_comparing() -> None:
    ceilings = [Ceiling(trace="t", capacity_tokens=tokens, infinite=0.9, clairvoyant=0.8) for tokens in (100, 200)]
    cells = [cell("lru", 0.2), cell("s3fifo", 0.4), cell("s3fifo", 0.1, tokens=200)]
    found = compared(ceilings, cells)
    assert [each.of_clairvoyant for each in found] == pytest.approx([0.25, 0.5, 0.125])
    assert [each.of_lru for each in found] == [1.0, 2.0, None]


# -- command


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(bench, ["eviction", *arguments])


def test_the_built_in_workload_end_to_end(tmp_path: Path) -> None:
    written, drawn = tmp_path / "out.json", tmp_path / "out.png"
    files = ("--json", str(written), "--plot", str(drawn))
    done = invoke("--policy", "lru,s3fifo", "--capacity-tokens", "8000,16000", "--limit", "60", *files)
    assert done.exit_code == 0, done.output
    result = json.loads(written.read_bytes())
    assert result["complete"]
    assert [(each["capacity_tokens"], each["policy"]) for each in result["cells"]] == [
        (tokens, policy) for tokens in (8_000, 16_000) for policy in ("lru", "s3fifo")
    ]
    asked = conversations(60)
    assert result["cells"][0]["hit_rate"] == pytest.approx(global_lru(asked, 8_000).rate)
    assert result["ceilings"][0]["infinite"] == pytest.approx(infinite_cache(asked).rate)
    assert list(result["means"]) == ["lru", "s3fifo"]
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_default_capacities_depend_on_the_format(tmp_path: Path) -> None:
    mooncake, sessions = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    line = {"timestamp": 0, "input_length": 1_024, "output_length": 1, "hash_ids": [1, 2]}
    mooncake.write_text(json.dumps(line) + "\n" + json.dumps(line))
    request = {"t": 0, "in": 640, "out": 1, "hash_ids": "1-10"}
    sessions.write_text(json.dumps({"primary": True, "block_size": 64, "requests": [request, request]}))
    written = tmp_path / "out.json"
    done = invoke("--trace", str(mooncake), "--trace", str(sessions), "--policy", "lru", "--json", str(written))
    assert done.exit_code == 0, done.output
    cells = json.loads(written.read_bytes())["cells"]
    assert [(each["trace"], each["capacity_tokens"] / 1e6) for each in cells] == [
        *(("a.jsonl", size) for size in (1, 3, 10)),
        *(("b.jsonl", size) for size in (0.5, 1, 3)),
    ]
    assert [each["hit_rate"] for each in cells] == [0.5] * 3 + [0.4] * 3


def test_an_interrupted_study_keeps_finished_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = StudiedStore.serve
    calls = 0

    def interrupted(self: StudiedStore, prompt: Prompt, hints: Hints) -> int:
        nonlocal calls
        calls += 1
        if calls == 100:
            raise KeyboardInterrupt
        return served(self, prompt, hints)

    monkeypatch.setattr(StudiedStore, "serve", interrupted)
    written = tmp_path / "out.json"
    done = invoke(
        "--policy", "lru,s3fifo", "--limit", "60", "--json", str(written), "--plot", str(tmp_path / "out.png")
    )
    assert done.exit_code == 130
    assert "interrupted" in done.output
    result = json.loads(written.read_bytes())
    assert not result["complete"]
    assert [each["policy"] for each in result["cells"]] == ["lru"]
    assert (tmp_path / "out.png").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--policy", "lru,best"), "'policy' is 'best'; expected names among .*lru"),
        (("--capacity-tokens", "-5"), "'capacity_tokens'"),
        (("--capacity-tokens", "10"), "'capacity_tokens' is 10; expected at least 64"),
        (("--hint-accuracy", "1.5"), "'hint_accuracy'"),
        (("--hint-accuracy", "nan"), "'hint_accuracy'"),
        (("--limit", "0"), "'limit'"),
        (("--plot", "a.jpg"), "'plot'"),
        (("--trace", "absent.jsonl"), "absent.jsonl: expected a readable file"),
    ],
)
def test_invalid_arguments_are_refused_by_name(arguments: tuple[str, ...], named: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert re.search(named, done.output)


def test_malformed_lines_are_told(tmp_path: Path) -> None:
    request = {"t": 0, "in": 640, "out": 1, "hash_ids": "1-10"}
    good = json.dumps({"primary": True, "block_size": 64, "requests": [request]})
    path = tmp_path / "sessions.jsonl"
    path.write_text("\n".join([good] * 150 + ["broken"]))
    done = invoke("--trace", str(path), "--policy", "lru", "--capacity-tokens", "100000")
    assert "sessions.jsonl: 1 malformed lines skipped" in done.output
